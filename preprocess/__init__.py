"""The CPU preprocessing pool: fetching, decoding, resizing and digesting media in killable worker
processes."""
