// The page, and what it is built on as `window.lab`, for a console and for tests.
import "./page/page";
import { createLab, DEFAULTS, theory } from "./engine";
import text from "../text.txt";

Object.assign(window, { lab: { createLab, DEFAULTS, theory, text } });
