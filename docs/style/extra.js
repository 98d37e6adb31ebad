// What is wider than its place can be scrolled by keyboard.
function focusable() {
  for (const one of document.querySelectorAll(".table-wrapper, pre, figure"))
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0
    else one.removeAttribute("tabindex")
}
addEventListener("load", focusable)
addEventListener("resize", focusable)
