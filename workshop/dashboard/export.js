"use strict";
// Shows the chosen view of the chosen group, profile or lab. A figure is drawn when it is first seen.
const {figures, config, chosenBy} = JSON.parse(document.getElementById("data").textContent);
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function show() {
  const view = chosen("view"), list = chosenBy[view] ?? "group";
  for (const name of ["group", ...Object.values(chosenBy).filter(Boolean)]) {
    document.getElementById(`${name}-field`).hidden = name !== list;
  }
  const key = list && document.getElementById(list).value;
  for (const part of document.querySelectorAll("[data-view]")) {
    part.hidden = part.dataset.view !== view || part.dataset.key !== key;
    if (part.hidden) continue;
    for (const graph of part.querySelectorAll("[data-figure]:empty")) {
      const figure = figures[graph.dataset.figure];
      Plotly.newPlot(graph, figure.data, figure.layout, config);
    }
  }
}

document.addEventListener("change", show);
show();
