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
# You are going to build an LLM inference engine: the program that turns a prompt into an answer,
# one token at a time. It runs a real chat model on your laptop. Later the same code runs on a GPU,
# with a kernel that you write yourself.
#
# There is nothing to sign up for, and you need no GPU. Every part of the engine is explained on one
# of the days, except for plumbing (reading and fetching files, the command line).

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
# The next cell loads the finished engine and asks it a question. The first run may fetch the model,
# which takes a minute.

# %%
from nanoserve import LLM, SamplingParams
from nanoserve.course.show import wrapped

llm = LLM("smollm2")
question = [{"role": "user", "content": "What is gravity?"}]
print(wrapped(llm.chat(question, SamplingParams(max_tokens=48)).text))

# %% [markdown]
# The model has 135 million parameters, which is small: it can tell you untrue things in good
# English. You build the engine under it, and you compare every part of the engine with a trusted
# answer.
#
# ## How a day works

# %%
today.picture("how-a-day-works")

# %% [markdown]
# 1. **Predict.** Before a measurement you are asked for a number. Put yours in place of `None`. You
#    will remember the right number better after a wrong guess.
# 2. **Your turn.** A cell holds a function with its shapes, its rules and no body. Write it and run
#    the cell: `today.check` tries it on a few cases and says which of them failed and how.
#    Stuck? `today.hint()` gives a hint about your mistake, and each call says more. You can also
#    leave every exercise alone and run the notebook to its end.
# 3. **Lands.** A cell that begins with `# lands in nanoserve/…` holds the engine's own code, word
#    for word. The cell is folded: open it once you have tried. It defines the name again, so from
#    there on the notebook uses the package's version. Only `today.mine()` (point 5) runs yours.
# 4. **Measure.** Every day has a plot of something that just ran on your machine, with your guess
#    in it.
# 5. **Your answer is the engine.** An answer that passes its check is saved. Inside
#    `with today.mine():` the engine runs with your function in place of the package's.
#
# Work on the copies in `work/`: they are yours, and an update of the repository never touches them.
# `nanoserve course reset 3` gives you a fresh Day 3 and keeps your old one beside it. After a
# restart of the kernel, first run the cells above the one you are in: Run → Run All Above Selected
# Cell.
#
# Try it. This is the smallest exercise of the course: how many bytes do `count` numbers take, if
# each has `bits` bits? The numbers are packed side by side: a number may begin in one byte and
# end in the next. A byte that is used in part counts as a whole byte. The result is an int.


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
# Most days take 30 to 60 minutes. The days build on one another, and each also runs by itself. An
# appendix holds the parts of a day that you can skip: open it if you want to know more.

# %% tags=["nbval-ignore-output"]
today.progress()

# %% [markdown]
# ## The words you need on the first day

# %%
today.glossary()

# %% [markdown]
# ## Is everything in place?
#
# This is what `nanoserve doctor` prints in a terminal. If something goes wrong later, quote it. If
# everything works but is far slower than you expect, other programs may be using your cores: close
# them, or set `OMP_NUM_THREADS=1` before you start Jupyter.

# %% tags=["nbval-ignore-output"]
from nanoserve.cli import report
from nanoserve.course.show import wrapped

for key, value in report():
    print(wrapped(f"{key:<16} {value}"))

assert "whole" in dict(report())["model"]

# %% [markdown]
# ## What you need to know
#
# Python, and a little PyTorch: what a tensor's shape is, and what a matrix product does. You need
# to know nothing about transformers, GPUs or serving: the days explain them.
#
# **Next:** open Day 1, `day01_oracle.ipynb`. There you get an answer that you can trust.
#
# **In one paragraph.** You will build the program that serves a language model, a day at a time, in
# notebooks whose code is the package itself. Each day asks for a guess, gives you a function to
# write, checks it, shows you the package's version, and measures the effect.
