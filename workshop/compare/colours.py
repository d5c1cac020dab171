"""The colour of each version and peer, the same in every picture and page."""

OF_VERSION = {
    "v1": "#808080",
    "v2": "#D55E00",
    "v3": "#0072B2",
    "v4": "#009E73",
    "hf": "#C06C9B",
    "hf-liger": "#9A7B2B",
}
"""Near Okabe and Ito's palette, told apart by all eyes; each 3:1 or better on white and on dark."""
OTHER = "#808080"
