// The page, and its engine as `window.lab`, for the browser's console and for tests.
import * as lab from "./engine";
import { fromAddress } from "./page/experiments";
import "./page/page";

Object.assign(window, { lab: { ...lab, fromAddress } });
