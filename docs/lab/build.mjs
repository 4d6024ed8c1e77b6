// Builds build/lab.html: index.html with its style and its script inlined, so that it needs neither network nor server.
import { mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { buildSync } from "esbuild";

const bundle = (entry) =>
  buildSync({
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    charset: "utf8",
    loader: { ".txt": "text" },
    external: ["./webgpu-*", "./webgl-*"], // for a model this small, starting a GPU's programs takes longer than a step
  }).outputFiles[0].text;

const license = readFileSync("node_modules/@jax-js/jax/LICENSE", "utf8");
const page = readFileSync("index.html", "utf8")
  .replace("<head>", `<!-- With jax-js:\n${license}-->\n<head>`)
  .replace(/<link rel="stylesheet" href="(.+?)">/, (_, file) => `<style>${bundle(file)}</style>`)
  .replace(/<script src="(.+?)"><\/script>/, (_, file) => `<script>${bundle(file)}</script>`);
mkdirSync("build", { recursive: true });
const unfinished = `build/${process.pid}.html`;
writeFileSync(unfinished, page);
renameSync(unfinished, "build/lab.html");
