/**
 * ComfyUI's page, as extensions see it. The one place that imports it.
 *
 * @module
 */
export { app } from "../../scripts/app.js";
export { api } from "../../scripts/api.js";
