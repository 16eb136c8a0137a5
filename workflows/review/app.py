"""The review page's server: every request passes the guard, every change passes the review session."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool

from shardwright.schemas.errors import ApprovalError, ShardwrightError, UsageError
from shardwright.schemas.plan import load_plan
from shardwright.schemas.policy import Policy
from shardwright.schemas.words import plural
from shardwright.workflows.report.units import count, duration, size
from shardwright.workflows.review.cards import cards_of
from shardwright.workflows.review.figures import region
from shardwright.workflows.review.guard import HEADERS, LARGEST_FORM_BYTES, Guard
from shardwright.workflows.review.live import news, run_of
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.trial import Trial, as_text, attempt, changed, choices, is_list
from shardwright.workflows.review.views import Page, page_of

HERE = Path(__file__).parent
STATIC = {"review.css": "text/css", "review.js": "text/javascript", "htmx.min.js": "text/javascript"}


class ReviewServer:
    """One session, one guard, one policy; requests take turns."""

    def __init__(
        self, session: ReviewSession, guard: Guard, policy: Policy | None = None, policy_name: str = ""
    ) -> None:
        self.session, self.guard, self.policy, self.policy_name = session, guard, policy, policy_name
        self.turn = threading.Lock()
        self.ready = threading.Event()
        self.ready.set()
        self.stopping: Callable[[], bool] = lambda: False
        self.templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.globals.update(choices=choices, is_list=is_list)
        self.templates.filters.update(size=size, duration=duration, count=count, as_text=as_text)

    def render(self, name: str, **values: Any) -> str:
        return self.templates.get_template(name).render(csrf=self.guard.csrf, region=region, **values)

    def page(self, trial: Trial | None = None, notice: str = "") -> Page:
        """The session as it is now; a plan that another reviewer put into the file is taken up."""
        current = load_plan(self.session.file)
        if current.hashes != self.session.plan.hashes:
            self.session.plan = current
            notice = notice or "Another reviewer changed the plan; this is how it stands now."
        return page_of(self.session, self.policy, self.policy_name, date.today().isoformat(), trial, notice)

    def look(self) -> dict[str, str]:
        """Event → data for pages that are open."""
        try:
            plan = load_plan(self.session.file).hashes.decision
        except ShardwrightError as error:
            plan = error.code
        return {"plan": plan, "run": self.render("run.html", run=run_of(self.session.file))}

    def trial(self, values: dict[str, str]) -> Trial:
        return attempt(self.session.stages, self.session.plan, values, self.policy, date.today().isoformat())

    def demand_same_plan(self, form: dict[str, str]) -> None:
        """The form was made for the plan under review.

        Raises:
            ApprovalError: ``changed-meanwhile``.
        """
        if form.get("plan") != self.session.plan.hashes.decision:
            raise ApprovalError(
                "changed-meanwhile",
                "the plan was edited after this page was opened",
                where=str(self.session.file),
                next_action="load the page again, and decide on the plan as it is now",
            )

    def proposal_id(self, index: str) -> str:
        """The id of a proposal by its place.

        Raises:
            UsageError: ``unknown-proposal``.
        """
        proposals = self.session.plan.evidence.proposals
        if not index.isascii() or not index.isdigit() or int(index) >= len(proposals):
            raise UsageError(
                "unknown-proposal", f"no proposal {index!r}", where="review page", next_action="load the page again"
            )
        return proposals[int(index)].id

    def question_id(self, index: str) -> str:
        """The id of a question by its place.

        Raises:
            UsageError: ``unknown-question``.
        """
        questions = self.session.plan.decision.questions
        if not index.isascii() or not index.isdigit() or int(index) >= len(questions):
            raise UsageError(
                "unknown-question", f"no question {index!r}", where="review page", next_action="load the page again"
            )
        return questions[int(index)].id

    def act(self, verb: str, form: dict[str, str]) -> str:
        """Do what a form asks for; returns what to say about it."""
        session, reason = self.session, form.get("reason", "")
        self.demand_same_plan(form)
        if verb == "accept":
            session.accept((self.proposal_id(form.get("proposal", "")),))
            return ""
        if verb == "accept-eager":
            names = tuple(c.id for c in cards_of(session) if c.state == "undecided" and not c.fused)
            session.accept(names)
            return f"Accepted {plural(len(names), 'region')} to run eagerly."
        if verb == "reopen":
            session.reopen(self.proposal_id(form.get("proposal", "")))
            return ""
        if verb == "reject":
            return session.reject(self.proposal_id(form.get("proposal", "")), reason)
        if verb == "choose":
            return session.choose(self.proposal_id(form.get("proposal", "")), form.get("variant", ""), reason)
        if verb == "answer":
            return session.answer(self.question_id(form.get("question", "")), form.get("answer", ""), reason)
        if verb == "edit":
            return session.edit(changed(session.plan, form), reason)
        if verb == "approve":
            session.approve(reason, every_fusion=False)
            return "Approved. `shardwright apply` runs exactly this plan."
        if verb == "reject-plan":
            session.reject_plan(reason)
            return "Rejected."
        raise UsageError("unknown-action", f"no action {verb!r}", where="review page", next_action="load it again")


READY_S = 120.0
"""Longest wait for the libraries that the first edit needs, loaded beside the page."""
LIGHT = ("accept", "reopen")
"""Actions that change one card and the count, not the plan."""


def build_app(server: ReviewServer) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="Shardwright review", docs_url=None, redoc_url=None, openapi_url=None)
    guard = server.guard

    @app.middleware("http")
    async def guarded(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        headers = {key.lower(): value for key, value in request.headers.items()}
        if request.url.path == "/open" and headers.get("host") in guard.hosts:
            response: Response = _opened(guard, request.query_params.get("token", ""))
        elif refusal := guard.refuses(request.method, headers, request.cookies.get(guard.cookie_name)):
            response = PlainTextResponse(f"Refused: {refusal}\n", status_code=403)
        else:
            response = await proceed(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def whole() -> Response:
        with server.turn:
            try:
                return HTMLResponse(server.render("review.html", page=server.page()))
            except ShardwrightError as error:
                return HTMLResponse(server.render("broken.html", error=error), status_code=409)

    @app.get("/events")
    async def events(request: Request) -> Response:
        async def over() -> bool:
            return server.stopping() or await request.is_disconnected()

        return StreamingResponse(news(server.session.file, server.look, over), media_type="text/event-stream")

    @app.get("/card/{index}")
    def card(index: str) -> Response:
        with server.turn:
            try:
                name = server.proposal_id(index)
            except UsageError as error:
                return _notice(server, error)
            found = next(card for card in cards_of(server.session) if card.id == name)
            return HTMLResponse(server.render("card_body.html", card=found))

    @app.get("/try/{number}")
    def rival(number: str) -> Response:
        server.ready.wait(READY_S)
        with server.turn:
            rivals = server.session.plan.evidence.alternatives
            if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= len(rivals):
                return PlainTextResponse("no such strategy\n", status_code=404)
            strategy = rivals[int(number) - 1].strategy.whole()
            mesh = {f"mesh.{name}": value for name, value in strategy.pop("mesh").items()}
            values = {axis: as_text(value) for axis, value in {**mesh, **strategy}.items()}
            trial = server.trial(changed(server.session.plan, values))
            return HTMLResponse(server.render("edit.html", page=server.page(trial)))

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in STATIC:
            return PlainTextResponse("no such file\n", status_code=404)
        return FileResponse(HERE / "static" / name, media_type=STATIC[name])

    @app.post("/preview")
    async def preview(request: Request) -> Response:
        form = guard.form(await _body(request))
        if form is None:
            return _forged()
        return await run_in_threadpool(_preview, server, form)

    @app.post("/act/{verb}")
    async def act(verb: str, request: Request) -> Response:
        form = guard.form(await _body(request))
        if form is None:
            return _forged()
        htmx = request.headers.get("hx-request") == "true"
        return await run_in_threadpool(_act, server, verb, form, htmx)

    return app


async def _body(request: Request) -> bytes:
    """The request's body, cut off just above the limit that the guard refuses at."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST_FORM_BYTES:
            break
    return data


def _opened(guard: Guard, token: str) -> Response:
    if not guard.open(token):
        return PlainTextResponse("Refused: this address works once, and only as it was printed\n", status_code=403)
    response = RedirectResponse("/", status_code=303)
    response.set_cookie(guard.cookie_name, guard.cookie, httponly=True, samesite="strict", path="/")
    return response


def _forged() -> Response:
    return PlainTextResponse("Refused: the form does not come from this page\n", status_code=403)


def _preview(server: ReviewServer, form: dict[str, str]) -> Response:
    server.ready.wait(READY_S)
    with server.turn:
        try:
            server.demand_same_plan(form)
            trial = server.trial(changed(server.session.plan, form))
            return HTMLResponse(server.render("diff.html", trial=trial))
        except ShardwrightError as error:
            return _notice(server, error)


def _act(server: ReviewServer, verb: str, form: dict[str, str], htmx: bool) -> Response:
    with server.turn:
        try:
            words = server.act(verb, form)
        except ShardwrightError as error:
            if htmx:
                return _notice(server, error)
            return HTMLResponse(server.render("broken.html", error=error), status_code=409)
        if not htmx:
            return RedirectResponse(f"/#{quote(form.get('anchor', ''))}", status_code=303)
        page = server.page(notice=words)
        if verb in LIGHT:
            name = server.proposal_id(form.get("proposal", ""))
            found = next(card for card in page.cards if card.id == name)
            return HTMLResponse(server.render("decided.html", page=page, card=found))
        return HTMLResponse(server.render("page.html", page=page))


def _notice(server: ReviewServer, error: ShardwrightError) -> Response:
    headers = {"HX-Retarget": "#notice", "HX-Reswap": "innerHTML"}
    return HTMLResponse(server.render("notice.html", error=error), status_code=409, headers=headers)
