package web

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// browser is a page in chromium. What its console and its policy complain of fails the
// test.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu    sync.Mutex
	wrong []string // guarded by mu
}

// watching tells of what the page's policy has refused, and of what a name of the
// cluster has run.
const watching = `addEventListener("securitypolicyviolation", (e) => {
	console.error("the policy refused", e.violatedDirective, e.blockedURI, e.sample);
});
window.alert = window.confirm = window.prompt = () => { window.hostile = 99; };`

// open starts chromium with the page.
func open(t *testing.T, address string) *browser {
	t.Helper()
	path := "/usr/bin/chromium"
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: test/web/install-deps.sh installs it", err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()))
	ctx, stop := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx, chromedp.WithErrorf(func(string, ...any) {})) // events that chromedp does not know
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // waits for the end of chromium
		stop()
	})
	b := &browser{t: t, ctx: ctx}
	chromedp.ListenTarget(ctx, b.heard)
	b.run(log.Enable(), runtime.Enable(), chromedp.ActionFunc(func(ctx context.Context) error {
		_, err := page.AddScriptToEvaluateOnNewDocument(watching).Do(ctx)
		return err
	}))
	b.size(1440, 900)
	b.run(chromedp.Navigate(address))
	t.Cleanup(b.quiet)
	return b
}

// heard takes what the browser says.
func (b *browser) heard(event any) {
	var text string
	switch e := event.(type) {
	case *runtime.EventConsoleAPICalled:
		if e.Type != runtime.APITypeError && e.Type != runtime.APITypeWarning {
			return
		}
		for _, a := range e.Args {
			text += " " + string(a.Value) + a.Description
		}
	case *runtime.EventExceptionThrown:
		text = e.ExceptionDetails.Text
		if x := e.ExceptionDetails.Exception; x != nil {
			text += " " + x.Description
		}
	case *log.EventEntryAdded:
		// A wrong filter, and a connection that has ended, are answered with such a status.
		if e.Entry.Source == log.SourceNetwork && (strings.Contains(e.Entry.Text, "400") || strings.Contains(e.Entry.Text, "404") && strings.Contains(e.Entry.URL, "/v1/connections/")) {
			return
		}
		text = string(e.Entry.Level) + ": " + e.Entry.Text + " " + e.Entry.URL
	case *page.EventJavascriptDialogOpening:
		text = "a dialog: " + e.Message
	default:
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wrong = append(b.wrong, text)
}

// complaints returns what was heard, and forgets it.
func (b *browser) complaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := b.wrong
	b.wrong = nil
	return list
}

// hasHeard returns an error unless there is a complaint with a text.
func (b *browser) hasHeard(text string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.wrong {
		if strings.Contains(c, text) {
			return nil
		}
	}
	return fmt.Errorf("it has said %q", b.wrong)
}

// quiet fails the test if there is a complaint.
func (b *browser) quiet() {
	b.t.Helper()
	for _, c := range b.complaints() {
		b.t.Errorf("the browser says: %s", c)
	}
}

func (b *browser) run(actions ...chromedp.Action) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	// The browser lives as long as the first context that it is used with.
	if err := chromedp.Run(b.ctx); err != nil {
		b.t.Fatal(err)
	}
	if err := chromedp.Run(ctx, actions...); err != nil {
		b.t.Fatal(err)
	}
}

// eval returns the value of an expression.
func eval[T any](b *browser, expression string) (value T) {
	b.t.Helper()
	b.run(chromedp.Evaluate(expression, &value))
	return value
}

// evalLater is eval for a promise.
func evalLater[T any](b *browser, expression string) (value T) {
	b.t.Helper()
	b.run(chromedp.Evaluate(expression, &value, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
	return value
}

// await waits until an expression is true, and looks at each frame.
func (b *browser) await(what, expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	err := chromedp.Run(ctx, chromedp.Poll(expression, nil, chromedp.WithPollingTimeout(patience)))
	if err != nil {
		b.t.Fatalf("%s: %v; the page says:\n%s", what, err, eval[string](b, `document.body.innerText`))
	}
}

// visit goes to a view by its address, and waits until the page is there.
func (b *browser) visit(hash string) {
	b.t.Helper()
	to, err := url.Parse(hash[1:])
	if err != nil {
		b.t.Fatal(err)
	}
	b.run(chromedp.Evaluate(fmt.Sprintf("document.activeElement.blur(); void (location.hash = %q)", hash), nil))
	b.await(hash+" is shown", fmt.Sprintf(`document.querySelector("[aria-current]").textContent.toLowerCase() === %q && document.getElementById("filter-input").value === %q`,
		to.Path[1:], to.Query().Get("f")))
}

// press sends keys.
func (b *browser) press(keys ...string) {
	b.t.Helper()
	for _, k := range keys {
		b.run(chromedp.KeyEvent(k))
	}
}

// filter types a filter, as a user does.
func (b *browser) filter(text string) {
	b.t.Helper()
	b.run(chromedp.Evaluate(`document.activeElement.blur()`, nil))
	b.press("/")
	b.await("the filter has the focus", `document.activeElement.id === "filter-input"`)
	b.run(chromedp.Evaluate(`document.activeElement.select()`, nil))
	if text == "" {
		b.press(kb.Delete)
	} else {
		b.press(text)
	}
	b.press(kb.Enter)
}

func (b *browser) size(width, height int64) {
	b.t.Helper()
	b.run(emulation.SetDeviceMetricsOverride(width, height, 1, width < 600))
}

// scheme sets what the system prefers, light or dark.
func (b *browser) scheme(name string) {
	b.t.Helper()
	b.run(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}, {Name: "prefers-reduced-motion", Value: "reduce"}}))
}

// picture writes what is seen to the test's output.
func (b *browser) picture(name string) {
	b.t.Helper()
	var png []byte
	b.run(chromedp.CaptureScreenshot(&png))
	if err := os.WriteFile(filepath.Join(b.t.ArtifactDir(), name+".png"), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// awaitRows waits until the table that is shown has these texts in its first column.
func (b *browser) awaitRows(want ...string) {
	b.t.Helper()
	list, err := json.Marshal(want)
	if err != nil {
		b.t.Fatal(err)
	}
	b.await(fmt.Sprintf("the table has %q", want), fmt.Sprintf(`JSON.stringify([...document.querySelectorAll("main tbody tr")].map((r) => r.cells[0].innerText)) === JSON.stringify(%s)`, list))
}

// within measures how long something takes, at most twenty times, and wants it to take
// less than a bound once: other programs of the machine may delay it.
func within(t *testing.T, bound time.Duration, what string, once func() time.Duration) {
	t.Helper()
	var all []time.Duration
	for range 20 {
		took := once()
		if all = append(all, took); took < bound {
			t.Logf("%s: %v", what, all)
			return
		}
	}
	t.Errorf("%s: %v, want less than %v", what, all, bound)
}
