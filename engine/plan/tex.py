r"""TeX commands that begin with \n, \r or \t. Must never list a command whose tail is a common English word.

A model writes ``\nu`` for a Greek letter and ``\nuse`` for a line break before "use". The whole run of letters
decides: only runs in this list stay literal. ``\the`` is left out on purpose (a tab before "he").
"""

from __future__ import annotations

from typing import Final

_COMMANDS = """
nabla natural nearrow ne neg neq nequiv newcommand newenvironment newline newpage nexists ngeq ngeqslant ngtr ni
nleftarrow nLeftarrow nleftrightarrow nleq nleqslant nless nmid nobreak nocite node noindent nolimits nonumber
normalfont normalsize not notag notin nparallel nprec npreceq nrightarrow nRightarrow nsim nsubseteq nsucc nsucceq
nsupseteq ntriangleleft ntriangleright nu null number numberwithin nvdash nvDash nwarrow
raggedleft raggedright raisebox rangle rbrace rbrack rceil ref relax renewcommand resizebox rfloor rgroup rhd rho
right Rightarrow rightarrow rightarrowtail rightharpoondown rightharpoonup rightleftarrows rightleftharpoons
rightrightarrows rightsquigarrow rightthreetimes risingdotseq rlap rm rmfamily rmoustache root rotatebox rrbracket
rtimes rule rvert rVert
tabcolsep tableofcontents tag tan tanh tau tbinom tbf tensor text textbackslash textbf textcircled textcolor textdegree
textheight textit textmd textnormal textrm textsc textsf textsl textstyle textsubscript textsuperscript texttt textup
textwidth tfrac therefore theta thickapprox thicksim thinspace tikz tilde times tiny title to today top toprule
triangle triangledown triangleleft trianglelefteq triangleq triangleright trianglerighteq tt ttfamily
twoheadleftarrow twoheadrightarrow
"""

TEX_COMMANDS: Final = frozenset(_COMMANDS.split())
