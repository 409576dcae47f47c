/**
 * The times of the last steps as a line.
 *
 * @module
 */
import { t } from "../texts.js";
import { stepTime } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 36;

/**
 * @param {number[]} seconds
 * @returns {SVGElement}
 */
export function history(seconds) {
  const [least, most] = [Math.min(...seconds), Math.max(...seconds)];
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const label = t("steps.history", { count: seconds.length, least: stepTime(least), most: stepTime(most) });
  svg.setAttribute("aria-label", label);
  svg.classList.add("pdit-history");
  const line = document.createElementNS(SVG, "polyline");
  const x = (/** @type {number} */ index) => (index * (WIDTH - 2)) / Math.max(1, seconds.length - 1) + 1;
  const y = (/** @type {number} */ value) => HEIGHT - 2 - (value / (most || 1)) * (HEIGHT - 4);
  line.setAttribute("points", seconds.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  svg.append(line);
  return svg;
}
