"use strict";
// Draws the charts of a page; a live one asks for what is new, and changes what has changed.
(() => {
  const EVERY_MS = 2000;
  const main = document.querySelector("main");
  const live = document.body.dataset.live;
  const seen = new Map();
  let shown = JSON.parse(document.getElementById("data").textContent);
  let version = document.body.dataset.version;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const merge = (a, b) => {
    const made = { ...a };
    for (const key in b) {
      const both = made[key] && typeof made[key] === "object" && !Array.isArray(b[key]) && typeof b[key] === "object";
      made[key] = both ? merge(made[key], b[key]) : b[key];
    }
    return made;
  };

  function layout(figure) {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
    return merge({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept", hovermode: "closest",
      font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
      margin: { l: 52, r: 12, t: 8, b: 42 }, xaxis: axis, yaxis: axis,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: colour("--faint") } },
      hoverlabel: { align: "left" },
    }, figure.layout);
  }

  function draw(block) {
    const place = document.getElementById("chart-" + block.id);
    if (!window.Plotly) { place.textContent = "the charting script could not be read"; return; }
    Plotly.react(place, block.figure.data, layout(block.figure), { responsive: true, displaylogo: false, displayModeBar: "hover" });
  }

  function fill(section, block) {
    section.className = block.wide ? "wide" : "";
    if (!block.figure) { section.innerHTML = block.html; return; }
    section.innerHTML = "<h2></h2><p class=note></p><div class=chart></div>";
    section.children[0].textContent = block.title;
    section.children[1].textContent = block.note;
    if (!block.note) section.children[1].remove();
    section.lastChild.id = "chart-" + block.id;
  }

  function show(first) {
    document.title = shown.title;
    const wanted = new Set(shown.blocks.map((block) => block.id));
    for (const section of [...main.children]) if (!wanted.has(section.id)) { section.remove(); seen.delete(section.id); }
    let before = null;
    for (const block of shown.blocks) {
      let section = document.getElementById(block.id);
      const text = JSON.stringify(block);
      const changed = seen.get(block.id) !== text;
      if (!section) {
        section = document.createElement("section");
        section.id = block.id;
        fill(section, block);
      } else if (changed && !first && !block.figure) {
        const at = [...section.querySelectorAll(".scroll")].map((part) => part.scrollTop);
        fill(section, block);
        section.querySelectorAll(".scroll").forEach((part, i) => { part.scrollTop = at[i] || 0; });
      }
      if ((before ? before.nextElementSibling : main.firstElementChild) !== section) {
        before ? before.after(section) : main.prepend(section);
      }
      if (block.figure && changed) draw(block);
      seen.set(block.id, text);
      before = section;
    }
  }

  function hush(text) {
    let note = document.getElementById("hush");
    if (!text) { if (note) note.remove(); return; }
    if (!note) { note = document.createElement("div"); note.id = "hush"; document.body.append(note); }
    note.textContent = text;
  }

  async function ask() {
    try {
      const answer = await fetch("data.json?have=" + version, { cache: "no-store" });
      if (answer.status === 200) {
        version = answer.headers.get("X-Version");
        shown = await answer.json();
        show(false);
      } else if (answer.status !== 204) {
        throw new Error(answer.statusText);
      }
      hush("");
    } catch (error) {
      hush("no answer: the page stands still");
    }
    setTimeout(ask, EVERY_MS);
  }

  show(true);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const block of shown.blocks) if (block.figure) draw(block);
  });
  if (live) setTimeout(ask, EVERY_MS);
})();
