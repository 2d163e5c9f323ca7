//go:build unix

package debughttp_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// picture takes a screenshot into the folder SERVICEPLANE_SCREENSHOTS, if it is set.
func (b *browser) picture(name string) {
	b.t.Helper()
	if folder := os.Getenv("SERVICEPLANE_SCREENSHOTS"); folder != "" {
		b.screenshot(filepath.Join(folder, name+".png"))
	}
}

// rowsShown returns the names in the rows that the document has, from top to bottom.
const rowsShown = `return [...document.querySelectorAll("#rows [role=row]")].filter((r) => r.service)
	.sort((a, b) => a.index - b.index).map((r) => r.querySelector("a").innerText).join(" ")`

func pageFiltersServices(t *testing.T, b *browser) {
	server := httptest.NewServer(judgedProxy(t))
	t.Cleanup(server.Close)
	b.size(1280, 860)
	b.open(server.URL + "/")
	b.awaitText("#count", "7 Services")
	rows := func(what, want string) {
		t.Helper()
		b.awaitValue(what, func() string { return want }, rowsShown)
	}
	rows("all, in order", "shop/broken shop/drops-all shop/drops-outside shop/lost-one shop/no-endpoints shop/rejects-some shop/works")
	verdict := func(name, want string) {
		t.Helper()
		b.await(name+" is shown as "+want, `const row = [...document.querySelectorAll("#rows [role=row]")].find((r) => r.innerText.includes(arguments[0]));
			return row.querySelector(".badge").innerText === arguments[1]`, name, want)
	}
	verdict("broken", "failed")
	verdict("drops-outside", "partly drops")
	verdict("rejects-some", "partly rejects")
	b.await("the chips have counts", `return document.querySelector("[data-filter=dropping].chip").innerText.replace(/\s+/g, " ") === "dropping 2"`)
	b.await("chips without Services are left out", `return document.querySelector(".chip[data-filter=ejected]") === null`)
	b.await("the columns do not move each other", `const box = (id) => document.getElementById(id).getBoundingClientRect(), gap = 20;
		return box("explain").top - box("health").bottom < gap && box("find").top - box("history").bottom < gap && box("history").left > box("health").right`)
	b.await("the table has its roles", `return document.querySelector("#services").role === "table" && document.querySelectorAll("#services [role=columnheader]").length === 5 &&
		[...document.querySelectorAll("#rows [role=row]")].every((r) => r.querySelectorAll(":scope > [role=cell]").length === 5)`)
	b.picture("seven")
	b.click(".chip[data-filter=dropping]")
	rows("the ones that drop", "shop/drops-all shop/drops-outside")
	b.awaitText("#count", "2 Services")
	b.await("the chip is pressed, and the URL has it", `return document.querySelector(".chip[data-filter=dropping]").ariaPressed === "true" && location.hash === "#filter=dropping"`)
	b.run(`document.querySelector("#search").focus()`)
	b.typeHere("all")
	rows("a search within the filter", "shop/drops-all")
	b.run("history.back()")
	rows("back to no filter", "shop/broken shop/drops-all shop/drops-outside shop/lost-one shop/no-endpoints shop/rejects-some shop/works")
	// The counts of the status lead to lists.
	b.click("#families button[data-filter=failed]")
	rows("what failed", "shop/broken")
	b.open(server.URL + "/#filter=no-endpoints,affinity")
	rows("a link has several filters", "shop/no-endpoints")
	checkConsole(t, b)
}

func pageFollowsKeys(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.size(1280, 860)
	b.open(page)
	b.awaitText("#rows", "kube-system/dns")
	key := func(keys string) {
		t.Helper()
		b.typeHere(keys)
	}
	focused := func(want string) {
		t.Helper()
		b.await("the focus is on "+want, "return document.activeElement.innerText === arguments[0]", want)
	}
	key("j")
	focused("kube-system/dns")
	key("jj")
	focused("load/service-00001")
	key("k")
	focused("load/service-00000")
	b.run(`for (let i = 0; i < 100; i++) document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "j", bubbles: true }))`)
	focused("load/service-00100") // of the second window
	b.await("the focus is in sight", `const e = document.activeElement.getBoundingClientRect(), box = document.querySelector("#rows").getBoundingClientRect();
		return e.top >= box.top && e.bottom <= box.bottom`)
	key("\ue007") // Enter
	b.awaitText("#service-heading", "load/service-00100")
	b.await("the list is away", `return document.querySelector("#list").hidden`)
	key("\ue00c") // Esc
	focused("load/service-00100")
	key("/")
	b.await("the search has the focus", `return document.activeElement.id === "search" && document.activeElement.value === ""`)
	key("orders")
	b.await("keys are text in the search", `return document.activeElement.value === "orders"`)
	b.awaitValue("it finds one", func() string { return "shop/orders" }, rowsShown)
	key("\ue015") // arrow down
	focused("shop/orders")
	key("?")
	b.awaitText("#help", "next Service")
	key("\ue00c")
	b.await("the help is closed, and nothing else happened", `return !document.querySelector("#help").open && document.querySelector("#search").value === "orders"`)
	checkConsole(t, b)
}

// manyServices serves a proxy with Services of which each hundredth has no endpoints.
func manyServices(t *testing.T, services int) (page string) {
	t.Helper()
	p := newProxy(t)
	for i := range services {
		p.OnServiceAdd(numberedService(i))
		if i%100 != 0 {
			p.OnEndpointSliceAdd(numberedSlice(i, 2))
		}
	}
	p.run(t)
	p.sync(t)
	page, _ = serve(t, p)
	return page
}

// The document has only the rows in sight, wherever the list is scrolled to.
func pageScrollsThirtyThousand(t *testing.T, b *browser) {
	if os.Getenv("SERVICEPLANE_SCREENSHOTS") != "" {
		b.size(1280, 860)
		b.open(manyServices(t, 10_000))
		b.awaitText("#count", "10,000 Services")
		b.awaitText("#rows", "load/service-00001")
		b.picture("tenthousand")
		b.open("about:blank")
	}
	page := manyServices(t, 30_000)
	b.size(1280, 860)
	b.open(page)
	b.awaitText("#count", "30,000 Services")
	b.awaitText("#chips", "300")
	scrollTo := func(index int) {
		t.Helper()
		b.run(`const box = document.querySelector("#rows"); box.scrollTop = arguments[0] * parseFloat(getComputedStyle(box).getPropertyValue("--row"))`, index)
		b.awaitText("#rows", fmt.Sprintf("load/service-%05d", index))
		b.await("few rows are in the document", `return document.querySelectorAll("#rows [role=row]").length < 60`)
	}
	for _, index := range []int{0, 15_000, 29_999, 7, 20_123} {
		scrollTo(index)
	}
	// Scrolling through all of it asks for the windows where it stops, not for each on the way.
	// On a busy machine it also stops where the next frame is late. A poll asks for what is in sight, once a second.
	b.run(`window.asked = new Set(); window.stops = 1; const began = performance.now(), real = window.fetch;
		window.fetch = (...all) => { if (String(all[0]).startsWith("services")) window.asked.add(String(all[0])); return real(...all); };
		const box = document.querySelector("#rows");
		return new Promise((done) => { let i = 0, last = performance.now(); const step = () => {
			const now = performance.now(); if (now - last > 50) window.stops++; last = now;
			box.scrollTop = i++ * 5000; if (i < 200) { requestAnimationFrame(step); return; }
			window.stops += (performance.now() - began) / 1000; done(); }; step(); })`)
	b.awaitText("#rows", "load/service-29")
	b.await("few windows are asked for", "return window.asked.size <= 3 * window.stops")
	b.await("the rows have the place that their number says", `const row = [...document.querySelectorAll("#rows [role=row]")].find((r) => r.service);
		return Number(row.ariaRowIndex) === Number(row.service.name.slice(8)) + 2 && document.querySelector("#services").getAttribute("aria-rowcount") === "30001"`)
	checkConsole(t, b)
}

func pageCopiesCommands(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.open(page + "#q=it's&filter=dropping")
	b.run(`window.copied = ""; navigator.clipboard.writeText = async (text) => { window.copied = text; }`)
	address := strings.TrimSuffix(page, "/")
	copies := func(button, want string) {
		t.Helper()
		b.click(button)
		b.awaitValue(button+" copies a command", func() string { return want }, "return window.copied")
	}
	b.awaitText("#copy-list", "Copy as curl")
	copies("#copy-list button:first-child", "curl -s '"+address+"/services?q=it%27s&filter=dropping'")
	copies("#copy-list button:last-child", "spctl --address="+address+` services --filter=dropping -- 'it'\''s'`)
	b.open(page + "#namespace=shop&name=web")
	b.awaitText("#ports", "198.51.100.10:80")
	b.run(`window.copied = ""; navigator.clipboard.writeText = async (text) => { window.copied = text; }`)
	copies("#copy-service button:first-child", "curl -s '"+address+"/service?namespace=shop&name=web'")
	copies("#copy-service button:last-child", "spctl --address="+address+" get shop/web")
	b.fill("[name=source]", "203.0.113.7")
	b.fill("[name=destination]", "198.51.100.10:80")
	b.click("#packet button")
	b.awaitText("#verdict", "forward")
	copies("#copy-packet button:last-child", "spctl --address="+address+" explain --origin=outside 203.0.113.7 198.51.100.10:80/TCP")
	b.awaitText("#copy-packet", "Copied")
	b.await("a report can be downloaded", `const a = document.querySelector("#download");
		return a.download === "serviceplane.json" && a.href === arguments[0] + "report"`, page)
	checkConsole(t, b)
}

// The URL holds the packet too, and each step is one back.
func pageGoesBack(t *testing.T, b *browser) {
	p := busyProxy(t)
	page, _ := serve(t, p)
	b.size(1280, 860)
	b.open(page + "#in=shop")
	b.awaitText("#count", "6 Services")
	b.awaitText("#namespace", "load (300)")
	b.await("the namespace is chosen", `return document.querySelector("#namespace").value === "shop"`)
	b.click("#rows [role=row]:last-child a")
	b.awaitText("#service-heading", "shop/web")
	b.awaitText("#ports", "198.51.100.10:80")
	b.fill("[name=source]", "192.0.2.99")
	b.fill("[name=destination]", "198.51.100.10:80")
	b.click("#packet button")
	b.awaitText("#verdict", "drop")
	b.fill("[name=source]", "203.0.113.7")
	b.click("#packet button")
	b.awaitText("#verdict", "forward")
	b.picture("explain")
	link := b.run("return location.href")
	b.run("history.back()")
	b.awaitText("#verdict", "drop")
	b.await("the form is that of the packet", `return document.querySelector("[name=source]").value === "192.0.2.99"`)
	b.run("history.go(-2)")
	b.await("the list is back", `return document.querySelector("#service").hidden && location.hash === "#in=shop"`)
	b.awaitText("#count", "6 Services")
	b.open("about:blank")
	b.open(link)
	b.awaitText("#service-heading", "shop/web")
	b.awaitText("#verdict", "forward")
	checkConsole(t, b)
}

// counting answers counts and rules, as a proxy does whose engine counts.
func counting(h http.Handler, connections *atomic.Int64) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", h)
	mux.HandleFunc("/status", func(w http.ResponseWriter, r *http.Request) {
		recorded := httptest.NewRecorder()
		h.ServeHTTP(recorded, r)
		var status map[string]any
		_ = json.Unmarshal(recorded.Body.Bytes(), &status)
		status["answers"] = []string{"counts", "rules"}
		_ = json.NewEncoder(w).Encode(status)
	})
	mux.HandleFunc("/counts", func(w http.ResponseWriter, r *http.Request) {
		n := connections.Add(7)
		_ = json.NewEncoder(w).Encode(map[string]any{"since": "2026-01-02T03:04:05Z", "traffic": true, "trafficLosses": 1, "servicePorts": []any{map[string]any{
			"namespace": r.FormValue("namespace"), "name": r.FormValue("name"), "portName": "http", "protocol": "TCP", "family": "IPv4",
			"connections": n, "packetsIn": 5 * n, "packetsOut": 5 * n, "bytesIn": 500 * n, "bytesOut": 1000 * n,
			"endpoints": []any{
				map[string]any{"address": "10.244.1.5:8080", "connections": n - 5, "packetsIn": 3 * n, "packetsOut": 3 * n, "bytesIn": 300 * n, "bytesOut": 600 * n},
				map[string]any{"address": "10.244.2.5:8080", "connections": 5},
			},
		}}})
	})
	mux.HandleFunc("/rules", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"namespace": "shop", "name": "web", "families": []any{
			map[string]any{"family": "IPv4", "text": "add element ip kube-proxy services { 10.96.0.10 . tcp . 80 : goto service-web }\n" + evil},
		}})
	})
	return mux
}

func pageShowsTraffic(t *testing.T, b *browser) {
	p := newProxy(t)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.run(t)
	p.sync(t)
	var connections atomic.Int64
	server := httptest.NewServer(counting(debughttp.Handler(p), &connections))
	t.Cleanup(server.Close)
	b.size(1280, 1000)
	b.open(server.URL + "/#namespace=shop&name=web")
	b.awaitText("#traffic-note", "connections in")
	cell := `const row = [...document.querySelectorAll("#counters tr")].find((r) => r.children[0]?.innerText === arguments[0]); return row?.children[arguments[1]].innerText`
	b.awaitValue("an endpoint without traffic counts", func() string { return "5" }, cell, "10.244.2.5:8080", 1)
	b.awaitValue("unknown bytes are empty", func() string { return "" }, cell, "10.244.2.5:8080", 4)
	b.awaitValue("nothing came to it since", func() string { return "0/s" }, cell, "10.244.2.5:8080", 2)
	b.await("the other one grows", `return /^[\d.]+\/s$/.test([...document.querySelectorAll("#counters tr")].find((r) => r.children[0]?.innerText === "10.244.1.5:8080")?.children[2].innerText ?? "")
		&& parseFloat([...document.querySelectorAll("#counters tr")].find((r) => r.children[0]?.innerText === "10.244.1.5:8080").children[2].innerText) > 0`)
	b.awaitText("#counters", "kB/s")
	b.await("packets are in both directions", `return /^(\d+) \/ \1$/.test([...document.querySelectorAll("#counters tr")].find((r) => r.children[0]?.innerText === "10.244.1.5:8080")?.children[3].innerText ?? "")`)
	b.awaitText("#traffic-note", "dropped notifications 1 time")
	b.click("#rules summary")
	b.awaitText("#rules pre", "10.96.0.10 . tcp . 80")
	b.awaitText("#rules pre", evil)
	b.run("document.scrollingElement.scrollTop = 100_000")
	b.picture("traffic")
	checkConsole(t, b)

	// A proxy that does not count has no such part, and is not asked again.
	page, _ := serve(t, p)
	b.open(page + "#namespace=shop&name=web")
	b.awaitText("#ports", "10.244.1.5:8080")
	b.await("no traffic is shown", `return document.querySelector("#traffic").hidden`)
}

func pageShowsChanges(t *testing.T, b *browser) {
	p := newProxy(t)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.run(t)
	p.sync(t)
	page, _ := serve(t, p)
	b.open(page + "#namespace=shop&name=web")
	b.awaitText("#ports", "10.244.1.5:8080")
	b.awaitText("#changes", "none")
	p.OnEndpointSliceUpdate(nil, webSlice(proxiertest.Terminating()))
	p.sync(t)
	b.awaitText("#changes", "IPv4 http endpoint 10.244.1.5:8080: terminating, used, was ready, used")
	p.OnEndpointSliceDelete(webSlice())
	p.sync(t)
	b.awaitText("#changes", "IPv4 http endpoint 10.244.2.5:8080 is gone, was ready, used")
	b.awaitText("#changes", "IPv4 http frontend 10.96.0.10:80/TCP: reject, was forward")
	checkConsole(t, b)
}

func pageShowsFailures(t *testing.T, b *browser) {
	p := busyProxy(t)
	for i := range 40 {
		name := changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "load", Name: fmt.Sprintf("service-%05d", i)}, Port: "http", Protocol: v1.ProtocolTCP,
		}
		p.engines[v1.IPv4Protocol].Refuse(name, errors.New("netlink receive: no space left on device"))
		p.OnEndpointSliceUpdate(nil, numberedSlice(i, 3))
	}
	p.sync(t)
	page, _ := serve(t, p)
	b.size(1280, 860)
	b.open(page)
	b.awaitText("#families .badge", "40 failed")
	b.awaitText("#notes", "20 other service ports")
	b.click("#families button[data-filter=failed]")
	b.awaitText("#count", "40 Services")
	b.await("all rows have failed", `return [...document.querySelectorAll("#rows .badge")].every((e) => e.innerText === "failed")`)
	b.picture("failed")
	b.click("#notes button")
	b.awaitText("#ports .error", "no space left on device")
	b.awaitText("#service-heading", "load/service-00000")
	checkConsole(t, b)
}
