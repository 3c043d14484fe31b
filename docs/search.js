// The search page. Its index comes as a script and is searched by the page itself: a browser gives a
// page opened from a file neither the Worker nor the request that mkdocs' own search needs.
(() => {
  const input = document.getElementById("mkdocs-search-query");
  const results = document.getElementById("mkdocs-search-results");
  if (!input) return; // every other page
  const address = (path) => `${base_url}/${path}`;

  const load = (path) => new Promise((loaded, failed) => {
    const script = document.createElement("script");
    script.src = address(path);
    script.onload = loaded;
    script.onerror = () => failed(new Error(`${path} cannot be loaded: run make docs`));
    document.body.append(script);
  });

  const element = (name, parts, more = {}) => {
    const made = Object.assign(document.createElement(name), more);
    made.append(...parts);
    return made;
  };

  const entry = (doc) => element("article", [
    element("h3", [element("a", [doc.title], { href: address(doc.location) })]),
    element("p", [doc.text.slice(0, 200)]),
  ]);

  const start = () => {
    lunr.tokenizer.separator = /[^\p{L}\p{N}_]+/u; // so that max_staleness finds trainer.ppo.max_staleness
    const docs = new Map(searchIndex.docs.map((doc) => [doc.location, doc]));
    const index = lunr(function () {
      this.ref("location");
      this.field("title", { boost: 10 });
      this.field("text");
      searchIndex.docs.forEach((doc) => this.add(doc));
    });
    const search = () => {
      const words = lunr.tokenizer(input.value).filter((word) => `${word}`);
      const found = words.length ? index.query((query) => query.term(words)) : [];
      const shown = found.slice(0, 50).map((each) => entry(docs.get(each.ref)));
      const none = words.length ? "No results found" : "Type a word to search for.";
      results.replaceChildren(...(shown.length ? shown : [element("p", [none])]));
    };
    input.value = new URLSearchParams(location.search).get("q") ?? "";
    input.addEventListener("input", search);
    search();
  };

  load("search/lunr.js").then(() => load("search/search_index.js")).then(start)
    .catch((error) => results.replaceChildren(element("p", [error.message])));
})();
