//go:build unix

package debughttp_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// browser is a session with Chromium, over the W3C WebDriver protocol. Its methods end
// the test if they fail.
type browser struct {
	t       *testing.T
	client  http.Client
	session string // base URL
}

// startBrowser skips the test unless SERVICEPLANE_REQUIRE_BROWSER is 1: a browser takes half a minute.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	if os.Getenv("SERVICEPLANE_REQUIRE_BROWSER") != "1" {
		t.Skip("needs chromium and chromedriver: set SERVICEPLANE_REQUIRE_BROWSER=1")
	}
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal(err)
	}
	driver, err := exec.LookPath("chromedriver")
	if err != nil {
		t.Fatal(err)
	}
	profile := t.TempDir()
	t.Cleanup(func() { awaitNoProcess(t, profile) })
	b := &browser{t: t, client: http.Client{Transport: &http.Transport{}, Timeout: poll.Timeout}}
	t.Cleanup(b.client.CloseIdleConnections)
	host := startDriver(t, driver, profile)
	var created struct {
		ID string `json:"sessionId"`
	}
	b.session = host + "/session"
	b.do(http.MethodPost, "", capabilities(chromium, profile), &created)
	b.session += "/" + created.ID
	t.Cleanup(func() { b.t = t; b.do(http.MethodDelete, "", nil, nil) })
	return b
}

// reset closes the page, and makes b a browser for another test.
func (b *browser) reset(t *testing.T) {
	t.Helper()
	b.t = t
	b.open("about:blank")
	b.devtools("Emulation.clearDeviceMetricsOverride", map[string]any{})
	b.devtools("Emulation.setEmulatedMedia", map[string]any{"features": []any{}})
	b.consoleErrors()
}

func capabilities(chromium, profile string) any {
	arguments := []string{
		"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--user-data-dir=" + profile,
	}
	return map[string]any{"capabilities": map[string]any{"alwaysMatch": map[string]any{
		"goog:chromeOptions": map[string]any{"binary": chromium, "args": arguments},
		"goog:loggingPrefs":  map[string]string{"browser": "ALL"},
		"timeouts":           map[string]int64{"script": poll.Timeout.Milliseconds(), "pageLoad": poll.Timeout.Milliseconds()},
	}}}
}

// startDriver starts the driver in its own process group, and ends the group with the
// test. It returns the URL of the driver, which chooses a port.
func startDriver(t *testing.T, path, dir string) (host string) {
	t.Helper()
	cmd := exec.Command(path, "--port=0")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines, read := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(read)
		defer close(lines)
		listening := regexp.MustCompile(`started successfully on port (\d+)`)
		for scanner := bufio.NewScanner(output); scanner.Scan(); {
			if match := listening.FindStringSubmatch(scanner.Text()); match != nil {
				lines <- match[1]
				break
			}
		}
		_, _ = io.Copy(io.Discard, output)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-read
		_ = cmd.Wait()
	})
	select {
	case port := <-lines:
		if port == "" {
			t.Fatal("the driver ended before it listened")
		}
		return "http://127.0.0.1:" + port
	case <-time.After(poll.Timeout):
		t.Fatal("the driver does not listen in time")
		return ""
	}
}

// awaitNoProcess ends the remaining processes of the browser and waits for their end.
// They have the profile in their command lines, except for helpers that end with them.
// Without /proc it does nothing.
func awaitNoProcess(t *testing.T, profile string) {
	t.Helper()
	poll.Until(t, "the end of the browser's processes", func() bool {
		left := processesWith(profile)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(left) == 0
	})
}

func processesWith(argument string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(content, []byte(argument)) {
			continue
		}
		pid := 0
		if _, err := fmt.Sscanf(file, "/proc/%d/cmdline", &pid); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// do sends one command. It decodes the result into value, unless that is nil.
func (b *browser) do(method, path string, body, value any) {
	b.t.Helper()
	var content io.Reader
	if method == http.MethodPost {
		text, err := json.Marshal(body)
		if err != nil {
			b.t.Fatal(err)
		}
		content = bytes.NewReader(text)
	}
	request, err := http.NewRequest(method, b.session+path, content)
	if err != nil {
		b.t.Fatal(err)
	}
	response, err := b.client.Do(request)
	if err != nil {
		b.t.Fatal(err)
	}
	defer response.Body.Close()
	answer := struct {
		Value json.RawMessage `json:"value"`
	}{}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		b.t.Fatalf("%s %s: %v", method, path, err)
	}
	if response.StatusCode != http.StatusOK {
		b.t.Fatalf("%s %s = %d %s", method, path, response.StatusCode, answer.Value)
	}
	if value == nil {
		return
	}
	if err := json.Unmarshal(answer.Value, value); err != nil {
		b.t.Fatalf("%s %s: %v in %s", method, path, err, answer.Value)
	}
}

func (b *browser) post(path string, body, value any) {
	b.t.Helper()
	b.do(http.MethodPost, path, body, value)
}

func (b *browser) open(url string) {
	b.t.Helper()
	b.post("/url", map[string]any{"url": url}, nil)
}

// run runs the body of a function and returns its result as text.
func (b *browser) run(script string, arguments ...any) string {
	b.t.Helper()
	if arguments == nil {
		arguments = []any{}
	}
	var value any
	b.post("/execute/sync", map[string]any{"script": script, "args": arguments}, &value)
	return fmt.Sprint(value)
}

// text returns the visible text of an element; empty if there is no such element.
func (b *browser) text(selector string) string {
	b.t.Helper()
	return b.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
}

func (b *browser) element(selector string) (path string) {
	b.t.Helper()
	const key = "element-6066-11e4-a52e-4f735466cecf" // of the W3C recommendation
	found := map[string]string{}
	b.post("/element", map[string]any{"using": "css selector", "value": selector}, &found)
	return "/element/" + found[key]
}

func (b *browser) click(selector string) {
	b.t.Helper()
	b.post(b.element(selector)+"/click", map[string]any{}, nil)
}

// fill replaces the text of an input element.
func (b *browser) fill(selector, text string) {
	b.t.Helper()
	element := b.element(selector)
	b.post(element+"/clear", map[string]any{}, nil)
	b.post(element+"/value", map[string]any{"text": text}, nil)
}

// typeHere types into the element with the focus.
func (b *browser) typeHere(text string) {
	b.t.Helper()
	active := map[string]string{}
	b.do(http.MethodGet, "/element/active", nil, &active)
	for _, id := range active {
		b.post("/element/"+id+"/value", map[string]any{"text": text}, nil)
	}
}

// await polls until a function's body returns true.
func (b *browser) await(what, script string, arguments ...any) {
	b.t.Helper()
	b.awaitValue(what, func() string { return "true" }, script, arguments...)
}

// awaitValue polls until a function's body returns a value that may change meanwhile.
func (b *browser) awaitValue(what string, want func() string, script string, arguments ...any) {
	b.t.Helper()
	var got string
	if !poll.Soon(func() bool { got = b.run(script, arguments...); return got == want() }) {
		b.t.Fatalf("%s: got %s, want %s; the page shows:\n%s", what, got, want(), b.text("body"))
	}
}

// awaitText polls until an element shows a text.
func (b *browser) awaitText(selector, text string) {
	b.t.Helper()
	b.await(selector+" shows "+text,
		"return [...document.querySelectorAll(arguments[0])].some((e) => e.innerText.includes(arguments[1]))", selector, text)
}

// size sets the size of the window.
func (b *browser) size(width, height int) {
	b.t.Helper()
	b.devtools("Emulation.setDeviceMetricsOverride", map[string]any{
		"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false,
	})
}

func (b *browser) devtools(command string, parameters map[string]any) {
	b.t.Helper()
	b.post("/goog/cdp/execute", map[string]any{"cmd": command, "params": parameters}, nil)
}

func (b *browser) screenshot(file string) {
	b.t.Helper()
	var text string
	b.do(http.MethodGet, "/screenshot", nil, &text)
	png, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(file, png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// consoleErrors returns the errors and warnings of the console since the last call.
func (b *browser) consoleErrors() (lines []string) {
	b.t.Helper()
	var log []struct{ Level, Message string }
	b.post("/se/log", map[string]any{"type": "browser"}, &log)
	for _, line := range log {
		if strings.EqualFold(line.Level, "SEVERE") || strings.EqualFold(line.Level, "WARNING") {
			lines = append(lines, line.Level+" "+line.Message)
		}
	}
	return lines
}
