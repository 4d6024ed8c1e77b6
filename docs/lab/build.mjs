// Builds build/lab.html: index.html with its style and its script inlined, so that it needs neither network nor server;
// the scripts and styles of the package's pages, into the package; and docs/story/block.svg. An argument names a folder
// for what is not in build/.
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { buildSync } from "esbuild";

const bundle = (entry) =>
  buildSync({
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    globalName: "pages", // of what an entry exports
    target: "es2022",
    charset: "utf8",
    loader: { ".txt": "text" },
    external: ["./webgpu-*", "./webgl-*"], // for a model this small, starting a GPU's programs takes longer than a step
  }).outputFiles[0].text;

function write(file, text) {
  if (existsSync(file) && readFileSync(file, "utf8") === text) return; // `mkdocs serve` watches docs/
  const unfinished = `${file}.${process.pid}`;
  writeFileSync(unfinished, text);
  renameSync(unfinished, file);
}

const license = readFileSync("node_modules/@jax-js/jax/LICENSE", "utf8");
const page = readFileSync("index.html", "utf8")
  .replace("<head>", `<!-- With jax-js:\n${license}-->\n<head>`)
  .replace(/<link rel="stylesheet" href="(.+?)">/, (_, file) => `<style>${bundle(file)}</style>`)
  .replace(/<script src="(.+?)"><\/script>/, (_, file) => `<script>${bundle(file)}</script>`);
mkdirSync("build", { recursive: true });
write("build/lab.html", page);

const [, , folder] = process.argv;
const assets = folder ?? "../../jaxformer/inspect/pages/assets";
for (const [name, kind] of [["page", "css"], ["page", "ts"], ["live", "css"], ["live", "ts"]]) {
  write(`${assets}/${name}.${kind === "ts" ? "js" : kind}`, bundle(`src/inspect/${name}.entry.${kind}`));
}

const module = buildSync({ entryPoints: ["src/story.ts"], bundle: true, write: false, format: "esm", loader: { ".css": "text" } });
const { block } = await import(`data:text/javascript,${encodeURIComponent(module.outputFiles[0].text)}`);
write(`${folder ?? "../story"}/block.svg`, block);
