// Returns what axe finds of level serious or critical, and the looks that it judged. `known` are the
// looks that it has judged before, on any page.
//
// Contrast follows from a text's color, size and weight and from what is painted behind it; whether a
// link differs from the text around it, from the same of both. A page has thousands of texts and some
// forty such looks, and nearly all of axe's time went into judging every text. Here it judges one of
// each look; if it cannot, all that have this look.
async known => {
  // The styles of a resized window, and what the page's scripts do about them.
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
  const faults = []
  async function run(context, options) {
    const found = await axe.run(context, options)
    for (const rule of found.violations)
      if (["serious", "critical"].includes(rule.impact))
        for (const node of rule.nodes)
          faults.push(`${rule.id}: ${node.html.slice(0, 160)}: ${JSON.stringify(node.any.slice(0, 1)).slice(0, 400)}`)
    return found
  }
  // "region" is slow, and of level moderate.
  const apart = Object.fromEntries(
    ["color-contrast", "link-in-text-block", "region"].map(rule => [rule, {enabled: false}])
  )
  await run(document, {resultTypes: ["violations"], rules: apart})

  const layers = new Map()
  function behind(one) {
    if (!one) return ""
    if (!layers.has(one)) {
      const style = getComputedStyle(one)
      const paint = [
        style.backgroundColor, style.backgroundImage, style.opacity, style.filter, style.mixBlendMode,
      ].join()
      const paints = paint !== "rgba(0, 0, 0, 0),none,1,none,normal"
      layers.set(one, behind(one.parentElement) + (paints ? `${paint};` : ""))
    }
    return layers.get(one)
  }
  function look(one) {
    const style = getComputedStyle(one)
    return [behind(one), style.color, style.fontSize, style.fontWeight, style.textShadow].join()
  }
  function block(one) {
    while (getComputedStyle(one).display.startsWith("inline")) one = one.parentElement
    return one
  }
  function linkLook(one) {
    const style = getComputedStyle(one)
    const line = [style.textDecorationLine, style.borderBottom, style.fontStyle, style.fontFamily]
    return [look(one), line, look(block(one))].join()
  }

  // The side bars of a narrow window are beside it until they are opened.
  function onScreen(one) {
    const box = one.getBoundingClientRect()
    return one.checkVisibility({visibilityProperty: true}) && box.right > 1 && box.bottom > 1 &&
      box.left < document.documentElement.scrollWidth
  }

  const texts = new Set(document.querySelectorAll("input, select, textarea"))
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  // axe leaves a text of one character undecided.
  while (walker.nextNode())
    if (walker.currentNode.data.trim().length > 1) texts.add(walker.currentNode.parentElement)
  const links = [...document.querySelectorAll("a[href]")].filter(
    one => getComputedStyle(one).display === "inline" &&
      block(one.parentElement).textContent.trim() !== one.textContent.trim()
  )
  const judged = []
  for (const [rule, elements, lookOf] of [
    ["color-contrast", texts, look], ["link-in-text-block", links, linkLook],
  ]) {
    const looks = new Map()
    for (const one of elements) {
      if (!onScreen(one)) continue
      const key = `${rule}: ${lookOf(one)}`
      if (!known.includes(key)) looks.set(key, [...(looks.get(key) ?? []), one])
    }
    for (const ask of [them => them.slice(0, 1), them => them.slice(1)]) {
      const asked = new Map([...looks].flatMap(([key, them]) => ask(them).map(one => [one, key])))
      if (!asked.size) break
      const found = await run({include: [...asked.keys()]}, {
        runOnly: [rule], resultTypes: ["violations", "passes"], elementRef: true,
      })
      for (const {element} of found.passes.flatMap(each => each.nodes))
        if (looks.delete(asked.get(element))) judged.push(asked.get(element))
    }
  }
  return {faults, judged}
}
