package spctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/internal/neterror"
	"github.com/serviceplane/serviceplane/internal/peer"
)

// proxy is a running proxy that the command asks.
type proxy struct {
	name   string // for errors
	base   *url.URL
	client *http.Client
}

// connect returns the proxy at an address. It sends nothing yet.
func (a *app) connect(address string) (*proxy, error) {
	base, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("--address: %w", err)
	}
	switch {
	case base.Scheme == "unix" && base.Host == "" && base.Path != "":
		return &proxy{address, &url.URL{Scheme: "http", Host: "localhost"}, socketClient(base.Path)}, nil
	case (base.Scheme == "http" || base.Scheme == "https") && base.Host != "":
		client := a.options.Client
		if client == nil {
			client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		}
		return &proxy{address, base, client}, nil
	default:
		return nil, fmt.Errorf("--address=%s: want http://HOST:PORT, or unix:///PATH for a socket", address)
	}
}

// errNotTrusted is what a socket of somebody else gets, who could tell anything.
var errNotTrusted = errors.New("its process is neither root's nor of your own user")

// socketClient keeps no connection open, so that none is left when the command ends.
func socketClient(path string) *http.Client {
	var dialer net.Dialer
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, "unix", path)
			if err == nil && !peer.IsTrusted(conn) {
				_ = conn.Close()
				return nil, errNotTrusted
			}
			return conn, err
		},
	}}
}

// request sends a request and returns the response, if its status is 200.
func (p *proxy) request(ctx context.Context, method, path string, query url.Values) (io.ReadCloser, error) {
	target := p.base.JoinPath(path)
	target.RawQuery = query.Encode()
	request, err := http.NewRequestWithContext(ctx, method, target.String(), http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", p.name, err)
	}
	if method == http.MethodPost { // pages of other sites cannot send this without a permission
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, p.unreachable(ctx, err)
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer func() { _ = response.Body.Close() }()
	return nil, p.refused(path, response)
}

// get returns the JSON of a GET.
func (p *proxy) get(ctx context.Context, path string, query url.Values) (json.RawMessage, error) {
	return p.send(ctx, http.MethodGet, path, query)
}

func (p *proxy) send(ctx context.Context, method, path string, query url.Values) (json.RawMessage, error) {
	body, err := p.request(ctx, method, path, query)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	content, err := io.ReadAll(body)
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", p.name, err)
	}
	if !json.Valid(content) {
		return nil, fmt.Errorf("read the answer of %s: it is not JSON; is the debug handler of a proxy mounted there?", p.name)
	}
	return content, nil
}

// unreachable says what to do about a proxy that does not answer.
func (p *proxy) unreachable(ctx context.Context, err error) error {
	if outer, ok := errors.AsType[*url.Error](err); ok {
		err = outer.Err // it repeats the URL
	}
	advice := "does the proxy run, with its debug handler at this address?"
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		advice = "it did not answer in time; see --request-timeout"
	case ctx.Err() != nil:
		return fmt.Errorf("ask %s: %w", p.name, context.Cause(ctx))
	case errors.Is(err, errNotTrusted):
		advice = "run this as the user of the proxy"
	case errors.Is(err, fs.ErrPermission):
		advice = "only root may connect: use sudo"
	case errors.Is(err, fs.ErrNotExist):
		advice = "is nodeproxy running on this node, and not with --debug-socket=off? Otherwise set --address"
	case neterror.Refused.Is(err) && strings.HasPrefix(p.name, "unix:"):
		advice = "the proxy that made this socket has ended"
	}
	return fmt.Errorf("ask %s: %w (%s)", p.name, err, advice)
}

// refusedError is the error that a proxy sent.
type refusedError struct {
	status int
	text   string
}

func (e *refusedError) Error() string { return e.text }

// refused returns the error of a response.
func (p *proxy) refused(path string, response *http.Response) error {
	const most = 1 << 16
	var sent answers.Error
	content, err := io.ReadAll(io.LimitReader(response.Body, most))
	if err == nil && json.Unmarshal(content, &sent) == nil && sent.Error != "" {
		if response.StatusCode == http.StatusNotFound && sent.Error == noSuchPage {
			sent.Error = "this proxy has no " + path + "; its version or configuration does not offer it"
			if path == "trace" {
				sent.Error = noTrace
			}
		}
		return &refusedError{response.StatusCode, fmt.Sprintf("%s: %s", p.name, sent.Error)}
	}
	return &refusedError{response.StatusCode, fmt.Sprintf("ask %s: %s (is the debug handler of a proxy mounted there?)", p.name, response.Status)}
}

// noTrace says who has the page trace.
const noTrace = "the page of this proxy has no trace: nodeproxy has one only at its socket, for spctl on the node without --address, and none in mode userspace; " +
	"a program that embeds an engine needs debughttp.WithTracer, see package node/packettrace"

// noSuchPage is the error of debughttp for an unknown path.
const noSuchPage = "no such page"

// decode reads an answer.
func decode[T any](content json.RawMessage) (value T, err error) {
	if err := json.Unmarshal(content, &value); err != nil {
		return value, fmt.Errorf("decode answer: %w", err)
	}
	return value, nil
}
