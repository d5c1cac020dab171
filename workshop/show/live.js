// The dashboard: draws charts as they come into view, follows the choice, and new results.
const page = document.getElementById("page");
let generation = page.dataset.generation, newest = 0;
let shown = location.search; // the choice of the page shown: a new one may still be on its way

const seen = new IntersectionObserver(entries => {
  for (const entry of entries.filter(entry => entry.isIntersecting)) {
    seen.unobserve(entry.target);
    draw(entry.target);
  }
}, {rootMargin: "300px"});

async function ask(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.text();
}

async function draw(box) {
  const query = new URLSearchParams(shown);
  query.set("chart", box.dataset.chart);
  box.innerHTML = await ask("/chart?" + query);
  box.classList.remove("later");
}

function watch() {
  document.querySelectorAll(".later").forEach(box => seen.observe(box));
}

async function load() {
  const mine = ++newest, choice = location.search, text = await ask(location.pathname + choice);
  if (mine !== newest) return;
  const focused = document.activeElement?.id;
  const made = new DOMParser().parseFromString(text, "text/html").getElementById("page");
  generation = made.dataset.generation;
  page.replaceChildren(...made.childNodes);
  shown = choice;
  if (focused) document.getElementById(focused)?.focus();
  watch();
}

page.addEventListener("change", event => {
  const form = event.target.form;
  if (form?.id !== "choice") return;
  const chosen = [...new FormData(form)].filter(([, value]) => value);
  history.replaceState(null, "", "?" + new URLSearchParams(chosen));
  load();
});

setInterval(async () => {
  const now = await ask("/generation").catch(() => generation); // the server may have ended
  if (now !== generation) load();
}, 1500);

watch();
