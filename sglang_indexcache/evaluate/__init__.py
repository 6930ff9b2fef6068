"""Whether a pattern keeps long-context quality: tasks, and the statistics of their outcomes.

Read in this order: `outcomes` (what was measured, and how it is paired), `inference` (a mean
difference and its bounds), `looks` (looking before the end without being wrong more often),
`design` (how many contexts a margin needs), `verdict` (what a run may say, and the sentence);
`tasks` (the questions, generated to an exact number of tokens); `evaluation` (what was recorded),
`summary`, `figures` and `report` (what is shown of it), `entry` (what a pattern file learns);
`logs` (the same for other harnesses' answers).

One evaluation has one primary endpoint: the mean over its cells (a task at a length) of
right(pattern) - right(reference). A *context* is a long prompt behind which several questions are
asked; contexts are independent of each other, the questions of one are not.
"""
