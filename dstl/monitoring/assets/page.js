"use strict";
// Polls what changes, while the page is seen; shows the texts of charts beside the pointer.
const page = document.getElementById("page");
const tip = document.getElementById("tip");
let shown = null;

async function look() {
  if (!document.hidden) {
    try {
      const asked = new URLSearchParams(location.search);
      asked.set("part", "1");
      const answer = await fetch("?" + asked, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      const places = [...document.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
      page.innerHTML = text;
      document.querySelectorAll(".scroll").forEach((each, i) => { each.scrollLeft = places[i] || 0; });
      shown = null;
      tip.hidden = true;
    } catch {
      const stale = document.getElementById("stale");
      if (stale) stale.hidden = false;
    }
  }
  setTimeout(look, Number(page.dataset.poll));
}

document.addEventListener("pointermove", (event) => {
  const at = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (at !== shown) {
    shown = at;
    tip.hidden = !at;
    if (at) tip.textContent = at.dataset.tip;
  }
  if (at) {
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
  }
});

setTimeout(look, Number(page.dataset.poll));
