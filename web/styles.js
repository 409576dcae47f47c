/**
 * Adds the extension's style sheet to the page.
 *
 * @module
 */

const SHEETS = ["panel/panel.css", "notices/notice.css"];

/** Adds the sheets once. */
export function addStyles() {
  for (const sheet of SHEETS) {
    const href = new URL(sheet, import.meta.url).href;
    if (document.querySelector(`link[href="${href}"]`)) continue;
    document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href }));
  }
}
