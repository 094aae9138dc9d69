"""The ears: from the speech package's sentences to letters."""
