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
/** Marks our badge among those of a node. */
const OURS = Symbol("parallel-dit");

/** Shows badges from now on. */
export function showBadges() {
  api.addEventListener(EVENT, (/** @type {{detail: Step}} */ { detail }) => {
    // The nodes of the subgraphs around it show it too: mostly these are what is in sight.
    const ids = detail.node.split(":");
    for (const count of ids.keys()) show(found(ids.slice(0, count + 1).join(":")), text(detail));
  });
}

/**
 * @param {any} node undefined if the open workflow has no such node
 * @param {string} words
 */
function show(node, words) {
  if (!node) return;
  const before = node.badges ?? [];
  node.badges = [...before.filter((/** @type {any} */ each) => !each[OURS]), badge(words)];
  node.setDirtyCanvas?.(true, false);
  // Nodes 2.0 looks again only when it is told.
  const changed = { type: "node:property:changed", nodeId: node.id, property: "badges" };
  node.graph?.trigger?.(changed.type, { ...changed, oldValue: before, newValue: node.badges });
}

/** @param {Step} step */
function text({ seconds, done, total, left }) {
  const each = t("badge.step", { seconds: stepTime(seconds) });
  return left && done < total ? `${each}, ${t("steps.left", { time: duration(left) })}` : each;
}

/** @param {string} words */
function badge(words) {
  const Badge = /** @type {any} */ (window).LGraphBadge;
  const made = Badge
    ? new Badge({ text: words, fgColor: "#ffffff", bgColor: "#1d4ed8" })
    : { text: words, fgColor: "#ffffff", bgColor: "#1d4ed8" };
  made[OURS] = true;
  return made;
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
