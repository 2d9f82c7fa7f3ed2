"""What every room uses, and what uses none: lines of code, words, warnings, contexts, patches."""
