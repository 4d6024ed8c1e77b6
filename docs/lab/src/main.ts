// The engine as `window.lab`, for the browser's console and for tests.
import * as lab from "./engine";

Object.assign(window, { lab });
