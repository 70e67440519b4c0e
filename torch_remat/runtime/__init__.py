"""The eager engine. Read its README first; the files follow the data: forward, tape, replay, backward."""
