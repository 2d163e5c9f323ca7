package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"go.uber.org/zap"
)

const (
	// bindRetry is how soon a busy address is tried again.
	bindRetry = 5 * time.Second
	// clientTimeout bounds every phase of a request, so that nobody can tie up the server.
	clientTimeout = 10 * time.Second
	// lastAnswers is how long requests may take once the program ends.
	lastAnswers = 500 * time.Millisecond
)

// server is an HTTP server that insists on its address.
type server struct {
	name, address string
	handler       http.Handler
	log           *zap.Logger
}

// run serves until ctx ends. An address that is busy is said once and tried again:
// it may be the predecessor's, who has not ended yet.
func (s *server) run(ctx context.Context) error {
	said := ""
	for ctx.Err() == nil {
		err := s.serve(ctx)
		if err == nil {
			break
		}
		if err.Error() != said {
			s.log.Error("server failed, will be tried again and again", zap.String("server", s.name), zap.Error(err))
			said = err.Error()
		}
		select {
		case <-time.After(bindRetry):
		case <-ctx.Done():
		}
	}
	return nil
}

// serve returns nil when ctx has ended.
func (s *server) serve(ctx context.Context) error {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", s.address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	web := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: clientTimeout, ReadTimeout: clientTimeout,
		WriteTimeout: clientTimeout, IdleTimeout: clientTimeout, ErrorLog: zap.NewStdLog(s.log),
	}
	served := make(chan error, 1)
	go func() { served <- web.Serve(listener) }()
	select {
	case err = <-served:
		return errors.Join(fmt.Errorf("serve: %w", err), web.Close())
	case <-ctx.Done():
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), lastAnswers)
	defer stop()
	if web.Shutdown(last) != nil {
		_ = web.Close()
	}
	if err = <-served; errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve: %w", err)
}
