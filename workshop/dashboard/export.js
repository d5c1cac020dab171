"use strict";
// Shows the chosen view of the chosen group or profile. A figure is drawn when it is first seen.
const {figures, config, ofProfiles} = JSON.parse(document.getElementById("data").textContent);
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function show() {
  const view = chosen("view"), ofProfile = ofProfiles.includes(view);
  document.getElementById("group-field").hidden = ofProfile;
  document.getElementById("profile-field").hidden = !ofProfile;
  const key = document.getElementById(ofProfile ? "profile" : "group").value;
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
