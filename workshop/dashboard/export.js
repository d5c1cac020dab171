"use strict";
// Shows the chosen view of the chosen group or profile. A figure is drawn when it is first seen.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const figures = read("figures"), config = read("config");
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function show() {
  const view = chosen("view"), ofProfiles = read("of-profiles").includes(view);
  document.getElementById("group-field").hidden = ofProfiles;
  document.getElementById("profile-field").hidden = !ofProfiles;
  const key = document.getElementById(ofProfiles ? "profile" : "group").value;
  for (const part of document.querySelectorAll("[data-view]")) {
    part.hidden = part.dataset.view !== view || part.dataset.key !== key;
    if (part.hidden) continue;
    for (const graph of part.querySelectorAll("[data-figure]:empty")) {
      const figure = figures[graph.dataset.figure];
      Plotly.newPlot(graph, figure.data, figure.layout, config);
    }
  }
}

document.addEventListener("change", (event) => {
  if (event.target.name === "theme") document.documentElement.dataset.theme = chosen("theme");
  else show();
});
show();
