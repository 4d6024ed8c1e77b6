// What draws a page without a live model; tests call the exported functions.
import "./attention";
import "./film";
import "./pictures";

export * from "./charts";
export * from "./page";
