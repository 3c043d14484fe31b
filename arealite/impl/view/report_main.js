// Draws the page, and says when it is there: <html data-ready>.

function drawBrowser(run) {
  const { table } = run;
  const tokens = new Tokens(table);
  const grid = new Grid(table, byId("grid"), (row) => detail.show(row).catch(fail));
  const detail = new Detail(run, tokens, byId("detail"), (row) => grid.select(row));
  new Filters(run, tokens, byId("filters"), grid, detail);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, select, textarea");
    if (!isTyping && (event.key === "j" || event.key === "k") && !byId("grid").contains(event.target)) {
      grid.key(event);
    }
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      byId("filters").elements.words.focus();
    }
  });
  readJson("end").then(({ unreadable }) => {
    if (unreadable) {
      byId("filters").after(make("p", { className: "bad" }, `${plural(unreadable, "payload")} could `
        + "not be read: those tokens are left blank. `arealite audit` says more."));
    }
  }).catch(fail);
}

function fail(error) {
  byId("head").append(make("p", { className: "bad" }, `This report cannot be shown whole: ${error}`));
  throw error;
}

/** Draw what there is; a section without anything is left out, and so is its link. */
async function draw() {
  const run = await readJson("about");
  drawHead(run);
  const parts = [["curves", drawCurves], ["waits", drawWaits], ["weights", drawWeights],
    ["trajectories", run.table ? drawBrowser : null], ["ledger", drawLedger], ["metrics", drawAll],
    ["config", drawConfig]];
  for (const [name, part] of parts) {
    if (!part || part(run) === false) byId(name).remove();
    else byId("nav").append(make("a", { href: `#${name}` }, byId(name).querySelector("h2").textContent));
  }
  document.documentElement.dataset.ready = "true";
}

draw().catch(fail);
