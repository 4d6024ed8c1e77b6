// Products with matrices of weights, in WebAssembly, which computes with vectors of four 32-bit floats: here, four rows
// of what is multiplied. So a weight is read once for four rows, and a sum has one order, whatever the number of rows.

// The most columns and rows of a matrix, and bytes of a number, of a vector, and of a page of memory.
const [MOST, NUMBER, VECTOR, PAGE] = [2 ** 20, 4, 16, 2 ** 16];

// The program, instruction by instruction (https://webassembly.github.io/spec/core/binary). Its two functions receive
// the address of vectors, one per column of a matrix; that of the matrix, which has a row per output; that of vectors,
// one per row; the bytes of a row of the matrix; and the end of the matrix. They take four rows of the matrix at a time,
// and so read up to three rows behind it, whose products are not used, or are products with zeros.
function assemble(): Uint8Array<ArrayBuffer> {
  const [INT, V128, VOID, FUNCTION, LOOP, END] = [0x7f, 0x7b, 0x40, 0x60, 0x03, 0x0b];
  type Code = number[]; // of instructions, or of parts of them
  const unsigned = (n: number): Code => (n < 128 ? [n] : [(n & 127) | 128, ...unsigned(n >> 7)]);
  const sized = (bytes: Code) => [...unsigned(bytes.length), ...bytes];
  const list = (...items: (number | Code)[]) => [items.length, ...items.flat()];
  const text = (letters: string) => list(...[...letters].map((letter) => letter.charCodeAt(0)));
  const section = (id: number, ...items: (number | Code)[]) => [id, ...sized(list(...items))];

  const [get, set] = [0x20, 0x21].map((code) => (local: number) => [code, local]);
  const number = (n: number) => [0x41, (n & 127) | 128, n >> 7]; // below 2^13
  const [add, shiftLeft] = [[0x6a], [0x74]];
  const [load, splat, store] = [[0x00, 4], [0x09, 2], [0x0b, 4]].map((code) => (offset: number) => [0xfd, ...code, offset]);
  const [sum, product] = [[0xfd, 0xe4, 1], [0xfd, 0xe6, 1]];
  const increase = (local: number, by: Code) => [...get(local), ...by, ...add, ...set(local)];
  const [less, againIf] = [[0x49], [0x0d, 0]];
  const loopUntil = (local: number, end: number, body: Code) => [LOOP, VOID, ...body, ...get(local), ...get(end), ...less, ...againIf, END];

  // Locals: the parameters; addresses of the current column, of the end of columns, and of four weights; four vectors,
  // and one more.
  const [columns, matrix, rows, stride, end, column, endOfColumns, weight, four, one] = [0, 1, 2, 3, 4, 5, 6, 7, 11, 15];
  const each = (body: (k: number) => Code) => [0, 1, 2, 3].flatMap((k) => body(k));
  const multiply = (begin: (k: number) => Code, atColumn: (k: number) => Code, finish: { ofColumn: Code; ofRows: Code }) => sized([
    ...list([6, INT], [5, V128]),
    ...get(columns), ...get(stride), ...number(2), ...shiftLeft, ...add, ...set(endOfColumns),
    ...loopUntil(matrix, end, [
      ...each((k) => [...get(matrix), ...set(weight + k), ...increase(matrix, get(stride)), ...begin(k)]),
      ...get(columns), ...set(column),
      ...loopUntil(column, endOfColumns, [
        ...get(column), ...load(0), ...set(one),
        ...each((k) => [...get(weight + k), ...splat(0), ...atColumn(k), ...increase(weight + k, number(NUMBER))]),
        ...finish.ofColumn,
        ...increase(column, number(VECTOR)),
      ]),
      ...finish.ofRows,
      ...increase(rows, number(4 * VECTOR)),
    ]),
    END,
  ]);
  const zero = [0xfd, 0x0c, ...new Array(VECTOR).fill(0)];
  const addTo = (vector: number, factor: number) => [...get(factor), ...product, ...get(vector), ...sum, ...set(vector)];
  // Each row: the sum over columns of weight times column.
  const linear = multiply((k) => [...zero, ...set(four + k)], (k) => addTo(four + k, one), {
    ofColumn: [], ofRows: each((k) => [...get(rows), ...get(four + k), ...store(k * VECTOR)]),
  });
  // To each column: add the sum over rows of weight times row.
  const transposed = multiply((k) => [...get(rows), ...load(k * VECTOR), ...set(four + k)], (k) => addTo(one, four + k), {
    ofColumn: [...get(column), ...get(one), ...store(0)], ofRows: [],
  });
  return Uint8Array.from([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0, // "asm", version 1
    ...section(1, [FUNCTION, ...list(INT, INT, INT, INT, INT), 0]), // type: five integers, and nothing returned
    ...section(2, [...text("js"), ...text("memory"), 2, 0, 0]), // import
    ...section(3, 0, 0), // both functions have this type
    ...section(7, [...text("linear"), 0, 0], [...text("transposed"), 0, 1]), // exports
    ...section(10, linear, transposed), // code
  ]);
}

let program: WebAssembly.Module | undefined; // compiled once, where a page has a model

// The memory of matrices of weights, and products with them.
export class Matmul {
  readonly weights: Float32Array;
  private functions: Record<string, (...numbers: number[]) => void>;
  private columns: Float32Array;
  private rows: Float32Array;

  constructor(size: number) {
    const weights = 2 * VECTOR * (MOST + 3); // their address, after the vectors of columns and of rows
    const memory = new WebAssembly.Memory({ initial: Math.ceil((weights + NUMBER * (size + 3 * MOST)) / PAGE) });
    this.functions = new WebAssembly.Instance((program ??= new WebAssembly.Module(assemble())), { js: { memory } })
      .exports as typeof this.functions;
    [this.columns, this.rows] = [0, weights / 2].map((at) => new Float32Array(memory.buffer, at, 4 * (MOST + 3)));
    this.weights = new Float32Array(memory.buffer, weights, size);
  }

  private call(name: string, W: Float32Array, width: number): void {
    const at = W.byteOffset;
    this.functions[name](this.columns.byteOffset, at, this.rows.byteOffset, NUMBER * width, at + W.byteLength);
  }

  // x Wᵀ + b for rows of x.
  linear(x: Float32Array, W: Float32Array, b: Float32Array | null, width: number): Float32Array {
    const [T, outputs] = [x.length / width, W.length / width];
    const y = new Float32Array(T * outputs);
    for (let t = 0; t < T; t += 4) {
      toVectors(x, t, width, this.columns);
      this.call("linear", W, width);
      fromVectors(this.rows, y, t, outputs);
    }
    if (b) for (let i = 0; i < y.length; i++) y[i] += b[i % outputs];
    return y;
  }

  // y W for rows of y.
  transposed(y: Float32Array, W: Float32Array, width: number): Float32Array {
    const outputs = W.length / width;
    const T = y.length / outputs;
    const x = new Float32Array(T * width);
    for (let t = 0; t < T; t += 4) {
      toVectors(y, t, outputs, this.rows);
      this.columns.fill(0, 0, 4 * width);
      this.call("transposed", W, width);
      fromVectors(this.columns, x, t, width);
    }
    return x;
  }
}

// Four rows of x from the row t as vectors, each of a column; zeros take the place of rows that x lacks, and of the
// vectors that complete a group of four.
function toVectors(x: Float32Array, t: number, width: number, vectors: Float32Array): void {
  vectors.fill(0, 0, 4 * width + 12);
  for (let r = t; r < t + 4 && r < x.length / width; r++) {
    for (let i = 0; i < width; i++) vectors[4 * i + r - t] = x[r * width + i];
  }
}

function fromVectors(vectors: Float32Array, x: Float32Array, t: number, width: number): void {
  for (let r = t; r < t + 4 && r < x.length / width; r++) {
    for (let i = 0; i < width; i++) x[r * width + i] = vectors[4 * i + r - t];
  }
}
