/**
 * Parallel Layout shows its mode first. Its other inputs count in the mode `degrees` alone: to change one chooses this
 * mode, and to choose another mode gives them their defaults.
 *
 * @module
 */

const NODE = "ParallelLayout";
const MODE = "mode";
const DEGREES = "degrees";

/** The inputs of workflows from before there was a mode, in the order of their values. */
const BEFORE = [
  "data", "cfg", "pipe", "ring", "ulysses", "tensor", "shard_weights", "stale", "patches", "warmup", "balance", "dsp",
];

/**
 * Ties the mode and the other inputs of a new node together.
 *
 * @param {any} node
 */
export function tieMode(node) {
  if (node.comfyClass !== NODE) return;
  const { widgets, onConfigure, onConnectionsChange } = node;
  /** @type {any} */
  const mode = widgets.find((/** @type {any} */ each) => each.name === MODE);
  // The page calls back for what nobody has changed, too.
  let seen = values(node);
  for (const widget of widgets) {
    const before = widget.callback;
    widget.callback = (/** @type {any[]} */ ...given) => {
      const result = before?.apply(widget, given);
      const changed = widget.value !== seen[widget.name];
      if (widget === mode) follow(node, mode.value);
      else if (changed && widget.value !== usual(node, widget)) choose(mode, DEGREES);
      seen = values(node);
      return result;
    };
  }
  node.onConfigure = (/** @type {any} */ info) => {
    onConfigure?.call(node, info);
    if (typeof info.widgets_values?.[0] === "number") readWithoutMode(node, mode, info.widgets_values);
    seen = values(node);
    if (mode.value === DEGREES) show(node, true);
  };
  node.onConnectionsChange = (/** @type {any[]} */ ...given) => {
    const [, place, connected] = given;
    const { name } = given[4] ?? node.inputs?.[place] ?? {};
    if (connected && name !== MODE && BEFORE.includes(name)) choose(mode, DEGREES);
    return onConnectionsChange?.apply(node, given);
  };
}

/**
 * @param {any} node
 * @param {string} mode the one that was chosen
 */
function follow(node, mode) {
  show(node, mode === DEGREES);
  if (mode === DEGREES) return;
  for (const widget of node.widgets) if (widget.name !== MODE) choose(widget, usual(node, widget));
}

/**
 * @param {any} widget
 * @param {any} value
 */
function choose(widget, value) {
  if (widget.value === value) return;
  widget.value = value;
  widget.callback?.(value); // Nodes 2.0 draws it anew
}

/**
 * @param {any} node
 * @param {boolean} shown
 */
function show(node, shown) {
  const before = node.showAdvanced;
  node.showAdvanced = shown;
  const changed = { type: "node:property:changed", nodeId: node.id, property: "showAdvanced" };
  node.graph?.trigger?.(changed.type, { ...changed, oldValue: before, newValue: shown });
}

/**
 * @param {any} node
 * @param {any} mode
 * @param {any[]} saved
 */
function readWithoutMode(node, mode, saved) {
  const read = Object.fromEntries(saved.map((value, place) => [BEFORE[place], value]));
  for (const widget of node.widgets) widget.value = read[widget.name] ?? usual(node, widget);
  mode.value = DEGREES;
}

/**
 * @param {any} node
 * @returns {Record<string, any>}
 */
function values(node) {
  return Object.fromEntries(node.widgets.map((/** @type {any} */ each) => [each.name, each.value]));
}

/**
 * @param {any} node
 * @param {any} widget
 */
function usual(node, widget) {
  return node.constructor.nodeData?.input?.optional?.[widget.name]?.[1]?.default;
}
