// What draws a page with a live model; tests call the exported functions.
export * from "./backward";
export * from "./decoder";
export * from "./drill";
export * from "./live";
export * from "./page.entry";
export * from "./patching";
export * from "./tokenizer";
