"""Texts that a careless page would run, load or follow."""

_CALL = "window.__ran=1"
_TAGS = [
    f"<script>{_CALL}</script>", "<SCRIPT SRC=//evil.example/x.js></SCRIPT>", f"<img src=x onerror={_CALL}>",
    f"<svg onload={_CALL}>", f"<svg><script>{_CALL}</script></svg>", f"<iframe src=\"javascript:parent.{_CALL}\"></iframe>",
    f"<iframe srcdoc=\"<script>parent.{_CALL}</script>\"></iframe>", f"<body onload={_CALL}>", f"<input autofocus onfocus={_CALL}>",
    f"<details open ontoggle={_CALL}>", f"<video src=x onerror={_CALL}>", f"<audio src=x onerror={_CALL}>",
    f"<math><mtext><img src=x onerror={_CALL}></mtext></math>", f"<object data=\"javascript:{_CALL}\"></object>",
    f"<embed src=\"javascript:{_CALL}\">", "<base href=//evil.example/>", "<meta http-equiv=refresh content=\"0;url=//evil.example\">",
    "<link rel=stylesheet href=//evil.example/x.css>", "<style>@import '//evil.example/x.css'</style>", f"<a href=\"javascript:{_CALL}\">x</a>",
    f"<form action=\"javascript:{_CALL}\"><button>x</button></form>", f"<button formaction=\"javascript:{_CALL}\">x</button>",
    f"<template><script>{_CALL}</script></template>", f"<noscript><p title=\"</noscript><img src=x onerror={_CALL}>\">",
    f"<marquee onstart={_CALL}>x</marquee>",
]  # fmt: skip
_ADDRESSES = [
    f"javascript:{_CALL}", f"JaVaScRiPt:{_CALL}", f" javascript:{_CALL}", f"java\tscript:{_CALL}", f"javascript&colon;{_CALL}",
    f"data:text/html,<script>{_CALL}</script>", f"vbscript:{_CALL}", "//evil.example/x", "file:///etc/passwd", "blob:http://x/y",
    f"https://a\" onmouseover=\"{_CALL}", "http://user:pass@evil.example/", f"&#106;avascript:{_CALL}", f"%6aavascript:{_CALL}",
    f"feed:javascript:{_CALL}",
]  # fmt: skip
_WRAPPERS = [
    "[x]({})", "![x]({})", "<{}>", "[x](<{}>)", "[x]({} \"title\")", "[![x]({})](http://a)", "# [x]({})", "- [x]({})", "> [x]({})",
]  # fmt: skip
_ODD = [
    "\u202eright to left", "\u0000nul", "\x1b[31mred\x1b[0m", "a\rb", "\ud7ff\ufffd", "\u2028line\u2029paragraph", "e\u0301" * 60,
    "\"'`><&", "{{constructor.constructor('window.__ran=1')()}}", "${window.__ran=1}", "__proto__", "constructor", "../../../etc/passwd",
    "%00%0a%0d", "]]>", "<!--", "-->", "<![CDATA[x]]>", "&lt;script&gt;", "\\u003cscript\\u003e", "'; DROP TABLE sessions; --",
    "\ufeff<script>window.__ran=1</script>", "<scr<script>ipt>window.__ran=1</scr</script>ipt>", "x" * 5000, "\U0001f469\u200d\U0001f4bb" * 50,
    "`<img src=x onerror=window.__ran=1>`", "```html\n<img src=x onerror=window.__ran=1>\n```", "| <img src=x onerror=window.__ran=1> |\n|---|",
]  # fmt: skip
BARE = [*_TAGS, *_ADDRESSES, *_ODD]
"""For views that read no Markdown, to which a wrapper is text as any other."""
TEXTS = [
    *_TAGS,
    *(wrapper.format(one) for one in _ADDRESSES for wrapper in _WRAPPERS),
    *_ODD,
    *(f"> {tag}" for tag in _TAGS),
]
"""At least 200."""
