/**
 * A badge with the time of a step on the nodes that run on ranks.
 *
 * @module
 */
import { api, app } from "./comfy.js";
import { duration, stepTime } from "./panel/words.js";
import { t } from "./texts.js";

/** @typedef {{node: string, done: number, total: number, seconds: number, left: number | null}} Step */

const EVENT = "parallel_dit.steps";

/** What the badge of a node says, by the node's number. @type {Record<number, string>} */
let said = {};
/** Numbers of nodes. @type {WeakMap<object, number>} */
const numbers = new WeakMap();
let count = 0;

/**
 * Shows badges from now on.
 *
 * @param {string} tab the id of a registered sidebar tab. Nodes 2.0 draws a badge anew when something reactive in it
 *   has changed. The page makes what is in a tab reactive, and offers extensions nothing else that is.
 */
export function showBadges(tab) {
  const place = app.extensionManager.getSidebarTabs().find((/** @type {{id: string}} */ { id }) => id === tab);
  place.badges = said;
  said = place.badges;
  api.addEventListener(EVENT, (/** @type {{detail: Step}} */ { detail }) => {
    // The nodes of the subgraphs around it show it too: mostly these are what is in sight.
    const ids = detail.node.split(":");
    for (const depth of ids.keys()) show(found(ids.slice(0, depth + 1).join(":")), text(detail));
  });
}

/**
 * Gives a new node a badge, which is not visible while it says nothing.
 *
 * @param {any} node
 */
export function addBadge(node) {
  const number = ++count;
  numbers.set(node, number);
  let drawn = badge("");
  node.badges?.push(() => {
    const words = said[number] ?? "";
    if (words !== drawn.text) drawn = badge(words);
    return drawn;
  });
}

/**
 * @param {any} node undefined if the open workflow has no such node
 * @param {string} words
 */
function show(node, words) {
  if (!node) return;
  if (!numbers.has(node)) addBadge(node);
  said[/** @type {number} */ (numbers.get(node))] = words;
  node.setDirtyCanvas?.(true, false);
}

/** @param {Step} step */
function text({ seconds, done, total, left }) {
  const each = t("badge.step", { seconds: stepTime(seconds) });
  return left && done < total ? `${each}, ${t("steps.left", { time: duration(left) })}` : each;
}

/** @param {string} words */
function badge(words) {
  const Badge = /** @type {any} */ (window).LGraphBadge;
  return new Badge({ text: words, fgColor: "#ffffff", bgColor: "#1d4ed8" });
}

/**
 * Finds a node by the name that ComfyUI has for it: `12`, or `12:5` for node 5 in the subgraph of node 12.
 *
 * @param {string} name
 * @returns {any}
 */
export function found(name) {
  let graph = app.rootGraph ?? app.graph;
  const ids = name.split(":");
  for (const id of ids.slice(0, -1)) graph = graph?.getNodeById(Number(id))?.subgraph;
  return graph?.getNodeById(Number(ids.at(-1)));
}
