// What scrolls sideways takes the keyboard's focus; the theme wraps wide tables only after the page is there.
const focusable = () =>
  document.querySelectorAll(".scrolls, .md-typeset__scrollwrap, pre > code").forEach((region) => {
    region.tabIndex = 0;
  });
window.addEventListener("load", () => setTimeout(focusable));
