/**
 * The extension, as ComfyUI's page loads it.
 *
 * @module
 */
import { addBadge, showBadges } from "./badges.js";
import { app } from "./comfy.js";
import { findDevices, offerDevices } from "./devices.js";
import { tieMode } from "./layout.js";
import { makeParallel } from "./make_parallel/command.js";
import { MET, meet } from "./notices/first_contact.js";
import { showNotices } from "./notices/notices.js";
import { button } from "./panel/buttons.js";
import { show } from "./panel/panel.js";
import { REPOSITORY } from "./repository.js";
import { readSettings, settings } from "./settings.js";
import { addStyles } from "./styles.js";
import { t } from "./texts.js";

const MAKE_PARALLEL = "ParallelDiT.MakeParallel";
const TAB = "parallel-dit";

/** Ends the shown panel. @type {() => void} */
let hide = () => {};

app.registerExtension({
  name: "ParallelDiT",
  commands: [
    { id: MAKE_PARALLEL, label: "Make parallel", icon: "pi pi-server", function: makeParallel },
  ],
  keybindings: [{ combo: { key: "p", alt: true, shift: true }, commandId: MAKE_PARALLEL }],
  settings: [...settings(), MET],
  aboutPageBadges: [{ label: "Parallel DiT", url: REPOSITORY, icon: "pi pi-server" }],
  menuCommands: [{ path: ["Parallel DiT"], commands: [MAKE_PARALLEL] }],
  getCanvasMenuItems: () => [null, { content: t("button.parallel"), callback: makeParallel }],
  nodeCreated(/** @type {any} */ node) {
    offerDevices(node);
    tieMode(node);
    addBadge(node);
  },
  refreshComboInNodes: findDevices,
  async setup() {
    addStyles();
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-server",
      title: t("title"),
      tooltip: t("tooltip"),
      type: "custom",
      render: (/** @type {HTMLElement} */ place) => {
        hide();
        hide = show(place, [button("parallel", makeParallel)]);
      },
      destroy: () => hide(),
    });
    showNotices();
    showBadges(TAB);
    await Promise.all([findDevices(), readSettings()]); // before the page makes nodes
    void meet(makeParallel);
  },
});
