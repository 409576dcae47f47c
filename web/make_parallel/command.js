/**
 * Makes the open workflow parallel, in one step of the page's undo.
 *
 * @module
 */
import { ask } from "../backend.js";
import { app } from "../comfy.js";
import { tell } from "../notices/toast.js";
import { known, t } from "../texts.js";

/** @typedef {{node: string, kind: string, loader: string}} Added */
/** @typedef {Added & {reason: string, detail: string, sentence: string}} Kept */

/** Puts Parallel Model and Parallel VAE behind every loader of the open workflow, and says what stays as it is. */
export async function makeParallel() {
  const workflow = app.extensionManager.workflow.activeWorkflow;
  const tracker = workflow.changeTracker;
  capture(tracker);
  const before = tracker.activeState;
  let made;
  try {
    made = await ask("make_parallel", { workflow: before });
  } catch (error) {
    tell("error", t("parallel.failed"), error.message);
    return;
  }
  if (made.added.length) await replace(workflow, before, made.workflow);
  const text = [summary(made.added), ...staying(made.kept)].join("\n");
  tell(made.added.length ? "success" : "info", t(made.added.length ? "parallel.done" : "parallel.nothing"), text);
}

/**
 * Shows another graph in a workflow's tab. The page's undo brings the one before back.
 *
 * @param {any} workflow
 * @param {object} before
 * @param {object} after
 */
async function replace(workflow, before, after) {
  const tracker = workflow.changeTracker;
  const undo = [...tracker.undoQueue, before];
  await app.loadGraphData(after, false, false, workflow, { checkForRerouteMigration: false });
  capture(tracker);
  tracker.undoQueue = undo; // loading begins a history of its own
  tracker.redoQueue = [];
  tracker.updateModified?.(before);
}

/** @param {any} tracker */
function capture(tracker) {
  (tracker.captureCanvasState ?? tracker.checkState).call(tracker);
}

/** @param {Added[]} added */
function summary(added) {
  const count = (/** @type {string} */ kind) => added.filter((each) => each.kind === kind).length;
  return added.length ? t("parallel.added", { models: count("MODEL"), vaes: count("VAE") }) : "";
}

/**
 * @param {Kept[]} kept
 * @returns {string[]} a line for each reason
 */
function staying(kept) {
  /** @type {Map<string, string[]>} */
  const names = new Map();
  for (const each of kept) {
    const why = each.reason === "file" ? each.detail : known(`kept.${each.reason}`, each.sentence);
    names.set(why, [...(names.get(why) ?? []), `${each.loader} (${each.node})`]);
  }
  return [...names].map(([why, loaders]) => t("parallel.kept", { loaders: loaders.join(", "), why }));
}
