# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Start here
#
# You are going to build an LLM inference engine: the program that turns a prompt into an answer, one
# token at a time. Not a sketch of one. It runs a real chat model on your laptop today, and the same
# code, with the same kernel source, runs a GPU at the limit of its memory at the end.
#
# Nothing to sign up for, no GPU needed, and no line of the engine that some day does not explain, but
# for plumbing (reading and fetching files, the command line).

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(0)
today.picture("engine")

# %% [markdown]
# ## Try the whole of it first
#
# Here is where the road leads. The next cell loads the finished engine and asks it a question.

# %%
from nanoserve import LLM, SamplingParams

llm = LLM("smollm2")
question = [{"role": "user", "content": "What is gravity?"}]
print(llm.chat(question, SamplingParams(max_tokens=48)).text)

# %% [markdown]
# The model has 135 million parameters, which is small: it will tell you untrue things in good
# English. The engine under it is the part that you build, and the part that is held to the last
# digit.
#
# ## How a day works

# %%
today.picture("how-a-day-works")

# %% [markdown]
# 1. **Predict.** Before anything is measured you are asked for a number. Put it in place of `None`:
#    a wrong guess is what makes the right number stay.
# 2. **Your turn.** A cell holds a function with its shapes, its rules and no body. Write it, run
#    the cell, and `today.check` tries it on a handful of cases and says which one failed and how.
#    Stuck? `today.hint()` looks at the case that failed. A notebook runs to its end with every
#    exercise left alone, so you may also read first and write later.
# 3. **Lands.** A cell that begins with `# lands in nanoserve/…` holds the engine's own code, word
#    for word. It comes folded: open it once you have tried. It defines the name anew, so the cells
#    below it use ours; `today.mine()`, in 5, is what runs yours.
# 4. **Measure.** Every day has a plot of something that just ran on your machine, with your guess
#    in it.
# 5. **Your answer is the engine.** An answer that passes is saved, and `with today.mine():` runs the
#    engine with your function in the place of ours.
#
# Work on the copies in `work/`: they are yours, and an update of the repository never touches them.
# `nanoserve course reset 3` gives you a fresh Day 3 and keeps your old one beside it.
#
# Try it. This is the smallest exercise of the course: how many bytes do `count` numbers of a type
# take, if one takes `bits`? They share bytes, and a byte that is begun is a whole one.


# %%
def bytes_for(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits each take when they are packed side by side."""
    raise NotImplementedError("your turn")


today.check(bytes_for)

# %%
today.hint()

# %% [markdown]
# ## The map
#
# Each day takes 30 to 60 minutes. The days build on one another, yet each runs by itself.

# %% tags=["nbval-ignore-output"]
today.progress()

# %% [markdown]
# ## The words you need on the first day

# %%
today.glossary()

# %% [markdown]
# ## Is everything in place?
#
# This is what `nanoserve doctor` prints in a terminal. If something goes wrong later, quote it.

# %% tags=["nbval-ignore-output"]
from nanoserve.cli import report

for key, value in report():
    print(f"{key:<16} {value}")

assert "whole" in dict(report())["model"]

# %% [markdown]
# ## What you need to know
#
# Python, and a little PyTorch: what a tensor's shape is, what a matrix product does. Nothing about
# transformers, GPUs or serving; those are what the days are for.
#
# **Next:** open Day 1, `day01_oracle.ipynb`. It gets hold of something you can trust.
#
# **In one paragraph.** You will build the program that serves a language model, a day at a time, in
# notebooks whose code is the package itself. Each day asks for a guess, gives you a function to
# write, checks it, shows you ours, and measures what it was worth.
