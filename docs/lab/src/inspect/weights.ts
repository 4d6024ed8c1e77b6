import { bytesOf, format, make } from "./page";

// A decoder's parameters as `weights.py` packs them. Large ones are read when the reader asks for it, from the page or
// from files beside it.

/** A decoder's parameters, packed; or those of all frames of a film, of which the steps are given. */
export interface Packed {
  weights: string | Uint8Array;
  bits: number;
  group: number;
  /** Names and sizes of the parameters. */
  arrays: [string, number][];
  film: number[];
}

export const toBytes = (weights: string | Uint8Array) => (typeof weights === "string" ? bytesOf(weights) : weights);

// Write the parameters of the last frame of a film, of another one, or the only ones, into an array of numbers.
export function decodeWeights({ weights, bits, arrays, group, film }: Packed, numbers: Float32Array, frame = film.length - 1): void {
  const all = toBytes(weights);
  const size = all.length / film.length;
  const bytes = film.length ? all.slice(frame * size, (frame + 1) * size) : all;
  if (bits === 8) decodeInt8(bytes, arrays, group, numbers);
  else decodeFloat16(bytes, numbers);
}

function decodeFloat16(bytes: Uint8Array, numbers: Float32Array): void {
  const number = (bits: number) => {
    const [exponent, fraction] = [(bits >> 10) & 31, (bits & 1023) / 1024];
    return (bits >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  };
  const table = Float32Array.from({ length: 2 ** 16 }, (_, bits) => number(bits));
  for (let i = 0; i < numbers.length; i++) numbers[i] = table[bytes[2 * i] | (bytes[2 * i + 1] << 8)];
}

function decodeInt8({ buffer }: Uint8Array, arrays: [string, number][], group: number, numbers: Float32Array): void {
  const isMatrix = ([name]: [string, number]) => name.slice(name.lastIndexOf(".") + 1).startsWith("W_");
  const sum = (of: (size: number) => number, sizes: [string, number][]) => sizes.reduce((total, [, size]) => total + of(size), 0);
  const floats = new Float32Array(buffer, 0, sum((size) => size, arrays.filter((array) => !isMatrix(array))));
  const scales = new Uint16Array(buffer, floats.byteLength, sum((size) => Math.ceil(size / group), arrays.filter(isMatrix)));
  const integers = new Int8Array(buffer, floats.byteLength + scales.byteLength);
  const scale = new Float32Array(1); // the upper half of its bits is a bfloat16
  const bits = new Uint32Array(scale.buffer);
  let [at, vector, integer, index] = [0, 0, 0, 0];
  for (const array of arrays) {
    const end = at + array[1];
    if (!isMatrix(array)) numbers.set(floats.subarray(vector, (vector += array[1])), at);
    else {
      for (let last; at < end; ) {
        bits[0] = scales[index++] << 16;
        for (last = Math.min(at + group, end); at < last; at++) numbers[at] = scale[0] * integers[integer++];
      }
    }
    at = end;
  }
}

/** Where the weights are: their size in bytes and, if they are in files beside the page, its names and their hash. */
interface Stored {
  size: number;
  files?: string[];
  sha256?: string;
}

/**
 * Say what weights take, and where they are; call `begin(data)`, with the weights, when the reader has chosen them. A
 * page that is served fetches those beside it; one that is opened from disk may not.
 */
export function offer<Data extends Packed & Stored>(container: HTMLElement, data: Data, begin: (data: Data) => void): void {
  const { files, size, sha256, arrays } = data;
  const memory = size + arrays.reduce((sum, [, n]) => sum + 4 * n, 0); // as float32, and a fifth for what it computes
  const takes = `${format(size / 1e6, 3)} MB, and about ${format((1.2 * memory) / 1e6, 2)} MB of memory`;
  const box = make("div", container, "", "offer");
  const unused = new AbortController(); // of the listeners
  const { signal } = unused;
  const names = files && `${files[0]}${files.length > 1 ? ` to ${files.length - 1}` : ""}`;
  if (files && location.protocol === "file:") {
    const field = make("label", box, `The model's weights are in ${names}, in the folder that this page was written to. Choose ${files.length > 1 ? `all ${files.length} files, or drop them` : "it, or drop it"} on the page, to load the model: ${takes}.`);
    const input = make("input", field);
    [input.type, input.multiple] = ["file", true];
    input.addEventListener("change", () => read(input.files));
    document.addEventListener("dragover", (event) => event.preventDefault(), { signal });
    document.addEventListener("drop", (event) => { event.preventDefault(); read(event.dataTransfer?.files); }, { signal });
  } else {
    const button = make("button", box, `Load the model (${takes})`, "plain");
    button.addEventListener("click", () => (files ? fetchAll(files, button) : load(data.weights)));
  }
  const status = make("p", box, "", "status");
  status.setAttribute("role", "status");
  const tell = (text: string) => { status.textContent = text; };

  async function read(chosen: FileList | null = null): Promise<void> {
    if (!chosen?.length) return;
    const parts = [...chosen].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const blob = new Blob(parts);
    if (blob.size !== size) return tell(`${parts.map(({ name }) => name).join(", ")}: ${format(blob.size)} bytes, but this model's weights have ${format(size)}. Choose ${names}.`);
    tell("Reading …");
    const bytes = await blob.arrayBuffer().catch(() => null);
    if (!bytes) return tell(`${names} cannot be read.`);
    check(new Uint8Array(bytes));
  }

  async function fetchAll(files: string[], button: HTMLButtonElement): Promise<void> {
    button.disabled = true;
    const bytes = new Uint8Array(size);
    const bar = make("progress", box);
    [bar.max, bar.value, bar.ariaLabel] = [size, 0, "weights fetched"];
    let [at, from] = [0, ""];
    tell(`Fetching ${format(size / 1e6, 3)} MB …`); // once, as it is read aloud; the bar shows how far it is
    try {
      for (from of files) {
        const response = await fetch(encodeURIComponent(from));
        if (!response.ok) throw new Error(`status ${response.status}`);
        for (const reader = response.body!.getReader(); ; ) {
          const { done, value } = await reader.read();
          if (done) break;
          bytes.set(value, at);
          bar.value = at += value.length;
        }
      }
      if (at !== size) throw new Error("it is too short");
      await check(bytes);
    } catch (error) {
      tell(`${from} cannot be fetched: ${(error as Error).message}.`);
    }
    bar.remove();
    button.disabled = false;
    button.focus();
  }

  async function check(bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    if (crypto.subtle) { // which pages without TLS, but those on disk, lack
      const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
      const hash = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
      if (hash !== sha256) return tell(`These are other weights than this page's: ${location.protocol === "file:" ? "choose" : "put beside it"} the ${names} that it was written with.`);
    }
    load(bytes);
  }

  function load(weights: string | Uint8Array): void {
    if (signal.aborted) return; // chosen twice
    unused.abort();
    tell("Loading the model …");
    setTimeout(() => { // the status is painted first
      box.remove();
      begin({ ...data, weights });
      container.querySelector("textarea")!.focus();
    }, 30);
  }
}
