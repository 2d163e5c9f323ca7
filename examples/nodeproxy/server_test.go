package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestABusyAddressIsTriedAgain every five seconds (HC-32), and said once.
func TestABusyAddressIsTriedAgain(t *testing.T) {
	var config net.ListenConfig
	busy, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	core, logs := observer.New(zap.InfoLevel)
	s := &server{name: "test", address: busy.Addr().String(), handler: http.NotFoundHandler(), log: zap.New(core)}
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), 4*bindRetry-time.Second)
		defer stop()
		if err := s.run(ctx); err != nil {
			t.Errorf("run = %v, want nil", err)
		}
	})
	if got := logs.FilterMessageSnippet("server failed").Len(); got != 1 {
		t.Errorf("%d lines about the failure, want 1 for all attempts", got)
	}
}

func TestTheServerAnswersUntilItsEnd(t *testing.T) {
	var config net.ListenConfig
	free, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- (&server{name: "test", address: address, handler: saying("hello"), log: zap.NewNop()}).run(ctx)
	}()
	got := ""
	eventually(func() bool { got = fetch(t, "http://"+address); return got != "" })
	if got != "hello" {
		t.Errorf("answer %q, want hello", got)
	}
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("run = %v, want nil", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the server goes on after the end of its context")
	}
	http.DefaultClient.CloseIdleConnections()
}

// fetch returns the body of an answer, or nothing.
func fetch(t *testing.T, url string) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return ""
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	return string(body)
}
