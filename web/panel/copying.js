/**
 * Copies a text to the clipboard.
 *
 * @module
 */

/**
 * @param {string} text
 * @returns {Promise<boolean>} whether the browser lets it
 */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // a page that is not from this machine has no clipboard of its own without TLS
  }
}

/** @param {string} text */
function copySelected(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.style.position = "fixed";
  area.style.opacity = "0";
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } finally {
    area.remove();
  }
}
