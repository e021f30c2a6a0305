"""How the page looks, on a screen and in print."""

from hetero.reporting.palette import FAINT, GROUND, INK, QUIET

CSS = (
    """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 32px 48px; max-width: 1060px; background: GROUND; color: INK;
  font: 15px/1.5 "DejaVu Sans", Verdana, Arial, sans-serif;
}
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; line-height: 1.35; margin: 0 0 4px; }
header p { margin: 0 0 4px; }
.quiet { color: QUIET; font-size: 13.5px; }
.cards { display: flex; flex-wrap: wrap; gap: 14px; margin: 20px 0; }
.card { flex: 1 1 170px; border: 1px solid FAINT; border-radius: 6px; padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; white-space: nowrap; }
.card span { display: block; font-size: 13.5px; }
.bar { height: 8px; border: 1px solid QUIET; border-radius: 2px; margin-top: 8px; }
.bar i { display: block; height: 100%; background: QUIET; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid FAINT; vertical-align: top;
  text-align: left; overflow-wrap: anywhere; }
th { font-weight: 600; }
tbody th { width: 15em; }
td.number, th.number { text-align: right; width: 10em; }
section { margin-top: 34px; }
figure { margin: 6px 0 0; }
figure svg { display: block; width: 100%; height: auto; }
.narrow { display: none; }
figcaption { color: QUIET; font-size: 13.5px; }
figure + table { margin-top: 10px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 24px 32px; }
.pair h2 { font-size: 15px; }
@media screen and (max-width: 720px) {
  body { padding: 16px; }
  .pair { grid-template-columns: 1fr; }
  .narrow { display: block; }
  figure:not(.scrolls) .wide { display: none; }
  .scrolls .wide { overflow-x: auto; }
  .scrolls svg { min-width: 760px; }
  tbody th { width: auto; min-width: 6em; }
  td.number, th.number { width: auto; overflow-wrap: normal; font-size: 12.5px; }
}
@page { size: A4; margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  h1 { font-size: 17pt; }
  h2 { font-size: 12pt; break-after: avoid; }
  .pair h2 { font-size: 10pt; }
  .card b { font-size: 15pt; }
  .card { padding: 8px 10px; flex: 1 1 120px; }
  .card span, .quiet, figcaption { font-size: 9pt; }
  table { font-size: 9pt; }
  td, th { padding: 2px 12px 2px 0; }
  section { margin-top: 18px; }
  section, figure, .card, tr { break-inside: avoid; }
}
""".replace("GROUND", GROUND)
    .replace("INK", INK)
    .replace("QUIET", QUIET)
    .replace("FAINT", FAINT)
)
