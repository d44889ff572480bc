// The theme is set before anything is drawn; without a choice it is the system's.
"use strict";
(() => {
  try {
    const chosen = localStorage.getItem("sluice.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // The browser keeps nothing for this page.
  }
})();
