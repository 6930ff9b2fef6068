"""Evaluation of a pattern's long-context quality: tasks, and statistics of their answers.

Read in this order: `plan` (what is asked, of which patterns), `run` (asking it), `corpus` and
`tasks` (the questions, generated to an exact number of tokens), `arms` (the servers' answers),
`evaluation` (what was recorded), `verdict` (what a run may say, and the sentence), `report` (what
is shown of it, and what a pattern file learns); `compare` (the same for other harnesses' answers).

One evaluation is a paired, clustered non-inferiority test with one primary endpoint: the mean over
its cells (strata: a task at a length) of right(pattern) - right(reference). A *context* is a long
prompt after which several questions are asked. Contexts are independent of each other; the
questions after one context are not.
"""
