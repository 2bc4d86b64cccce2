"use strict";
(() => {
  const clauses = [...document.querySelectorAll("tbody.clause")];
  const chapters = [...document.querySelectorAll("tbody.chapter")];
  const form = document.getElementById("filters");
  const shown = document.getElementById("shown");
  const nothing = document.getElementById("nothing");
  const figures = [...document.querySelectorAll("figure[data-clause]")];
  const noFigure = document.getElementById("no-figure");
  const openAll = document.getElementById("open-all");
  const texts = new Map(clauses.map((c) => [c, c.textContent.toLowerCase()]));

  // Without this script every check is open; with it they open on demand.
  document.documentElement.classList.add("js");
  form.hidden = false;

  const toggleOf = (clause) => clause.querySelector("button");

  const open = (clause, yes) => {
    clause.classList.toggle("open", yes);
    toggleOf(clause).setAttribute("aria-expanded", String(yes));
  };

  const matches = (clause, wanted) =>
    wanted.words.every((word) => texts.get(clause).includes(word)) &&
    (!wanted.chapter || clause.dataset.chapter === wanted.chapter) &&
    (!wanted.status || clause.dataset.statuses.split(" ").includes(wanted.status)) &&
    (!wanted.differs || "differs" in clause.dataset) &&
    (!wanted.bad || "bad" in clause.dataset);

  const filter = () => {
    const data = new FormData(form);
    const wanted = {
      words: data.get("text").toLowerCase().split(/\s+/),
      chapter: data.get("chapter"),
      status: data.get("status"),
      differs: data.has("differs"),
      bad: data.has("bad"),
    };
    for (const clause of clauses) clause.hidden = !matches(clause, wanted);
    const left = clauses.filter((clause) => !clause.hidden);
    const kinds = new Set(left.map((clause) => clause.dataset.chapter));
    for (const chapter of chapters) chapter.hidden = !kinds.has(chapter.dataset.chapter);
    nothing.hidden = left.length > 0;
    const ids = new Set(left.map((clause) => clause.id));
    for (const figure of figures) figure.hidden = !ids.has(figure.dataset.clause);
    noFigure.hidden = !figures.length || figures.some((figure) => !figure.hidden);
    shown.textContent = `${left.length} of ${clauses.length} clauses`;
  };

  const openAddressed = () => {
    const clause = document.getElementById(location.hash.slice(1));
    if (clause && clauses.includes(clause)) open(clause, true);
  };

  for (const clause of clauses) {
    toggleOf(clause).disabled = false;
    open(clause, false);
    clause.querySelector("tr.summary").addEventListener("click", (event) => {
      // A click that ends a selection of text in the row leaves the row as it is.
      if (event.target.closest("button") || !String(getSelection())) open(clause, !clause.classList.contains("open"));
    });
  }
  openAll.addEventListener("click", () => {
    const yes = openAll.getAttribute("aria-pressed") !== "true";
    openAll.setAttribute("aria-pressed", String(yes));
    for (const clause of clauses) open(clause, yes);
  });
  form.addEventListener("input", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", openAddressed);
  openAddressed();
  filter();
})();
