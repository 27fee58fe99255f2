"""The local interface of a member: what OpenAI's and Ollama's clients speak, and a page, over HTTP.

    server.py (Trio, hypercorn) -> guard.py (Host, Origin, key) -> bodies.py -> app.py (routes)
        -> answers.py -> engine.py (what is needed of a node)

The rest is pure: requests are read by ``openai_requests.py`` and ``ollama_requests.py``, answers written by
``openai_answers.py`` and ``ollama_answers.py``, an answer's text is divided into thinking, words and tool calls by
``speech.py`` with ``think.py`` and ``toolcalls.py``.
"""
