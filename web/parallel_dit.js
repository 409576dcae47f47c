/**
 * The extension, as ComfyUI's page loads it.
 *
 * @module
 */
import { app } from "./comfy.js";
import { show } from "./panel/panel.js";
import { addStyles } from "./styles.js";
import { t } from "./texts.js";

/** Ends the shown panel. @type {() => void} */
let hide = () => {};

app.registerExtension({
  name: "ParallelDiT",
  async setup() {
    addStyles();
    app.extensionManager.registerSidebarTab({
      id: "parallel-dit",
      icon: "pi pi-server",
      title: t("title"),
      tooltip: t("tooltip"),
      type: "custom",
      render: (/** @type {HTMLElement} */ place) => {
        hide();
        hide = show(place, []);
      },
      destroy: () => hide(),
    });
  },
});
