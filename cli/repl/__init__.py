"""The interactive loop: read (editor.py) -> dispatch (commands.py) -> answer (answering.py) -> render (render.py)."""
