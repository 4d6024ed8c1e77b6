// What the theme leaves out for readers without a mouse: boxes that scroll sideways are reached by the keyboard on
// every device, and the search has a name.
const reach = (box) => {
  if (box.scrollWidth > box.clientWidth && box.tabIndex < 0) box.tabIndex = 0;
};
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => reach(target)));
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .formula")) {
    resized.observe(box);
    new MutationObserver(() => reach(box)).observe(box, { attributeFilter: ["tabindex"] }); // the theme removes it
  }
});
