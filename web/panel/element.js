/**
 * Makes elements. Texts never become markup.
 *
 * @module
 */

/**
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes] functions listen to the event of their name; null and false are left out
 * @param {...(Node | string | null | undefined)} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, /** @type {EventListener} */ (value));
    else if (value !== null && value !== false && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
