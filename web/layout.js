/**
 * Parallel Layout hides what is seldom changed. What a workflow has changed is shown.
 *
 * @module
 */

const NODE = "ParallelLayout";

/**
 * Shows the advanced inputs of a loaded node if one of them has another value than a new node's.
 *
 * @param {any} node
 */
export function showChanged(node) {
  if (node.comfyClass !== NODE || node.showAdvanced) return;
  const { required = {}, optional = {} } = node.constructor.nodeData?.input ?? {};
  const specs = { ...required, ...optional };
  const changed = (node.widgets ?? []).some((/** @type {any} */ widget) => {
    const options = specs[widget.name]?.[1];
    return options?.advanced && widget.value !== options.default;
  });
  if (changed) node.showAdvanced = true;
}
