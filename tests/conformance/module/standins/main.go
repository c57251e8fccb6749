// Command standins replaces programs of images that this project does not download: curl, of which
// specs use a handful of options, nginx, which they only need to serve a page on port 80, to write its
// pid file and to end on SIGTERM, ipcs, which lists shared memory, nc, which sends its input over TCP or
// UDP and prints the reply, and nmeter, which prints the time in milliseconds. It acts as the one whose
// name it is called by.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	exitUsage   = 2
	exitConnect = 7
	exitTimeout = 28
	pidFile     = "/var/run/nginx.pid"
	sharedFile  = "/proc/sysvipc/shm"
	page        = "<!DOCTYPE html>\n<title>Welcome to nginx!</title>\n"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "curl":
		os.Exit(curl(os.Args[1:], os.Stdout, os.Stderr))
	case "ipcs":
		os.Exit(ipcs(os.Stdout, os.Stderr))
	case "nc":
		os.Exit(nc(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	case "nginx":
		os.Exit(nginx())
	case "nmeter":
		// Specs read the first line of `nmeter -d0 %3t` only.
		fmt.Println(time.Now().UTC().Format("15:04:05.000"))
	default:
		fmt.Fprintf(os.Stderr, "standins: call it as curl, ipcs, nc, nginx or nmeter, not as %q\n", name)
		os.Exit(exitUsage)
	}
}

// request holds the options of one call of curl.
type request struct {
	url, output, format    string
	include                bool
	overall, connectWithin time.Duration
}

func parse(arguments []string) (request, error) {
	var wanted request
	for len(arguments) > 0 {
		option := arguments[0]
		arguments = arguments[1:]
		switch option {
		case "-g", "-q", "-s": // no globs, no configuration file, no progress: as this program is
			continue
		case "-i":
			wanted.include = true
			continue
		}
		if !strings.HasPrefix(option, "-") {
			wanted.url = option
			continue
		}
		if len(arguments) == 0 {
			return wanted, fmt.Errorf("option %s has no value", option)
		}
		value := arguments[0]
		arguments = arguments[1:]
		switch option {
		case "-o":
			wanted.output = value
		case "-w":
			wanted.format = value
		case "--max-time", "--connect-timeout":
			seconds, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return wanted, fmt.Errorf("option %s: %w", option, err)
			}
			limit := time.Duration(seconds * float64(time.Second))
			if option == "--max-time" {
				wanted.overall = limit
			} else {
				wanted.connectWithin = limit
			}
		default:
			return wanted, fmt.Errorf("option %s is unknown", option)
		}
	}
	if wanted.url == "" {
		return wanted, errors.New("no URL")
	}
	if !strings.Contains(wanted.url, "://") {
		wanted.url = "http://" + wanted.url
	}
	return wanted, nil
}

func curl(arguments []string, stdout, stderr io.Writer) int {
	wanted, err := parse(arguments)
	if err != nil {
		fmt.Fprintln(stderr, "curl:", err)
		return exitUsage
	}
	dialer := net.Dialer{Timeout: wanted.connectWithin}
	client := http.Client{
		Timeout:   wanted.overall,
		Transport: &http.Transport{DialContext: dialer.DialContext},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		},
	}
	response, err := client.Get(wanted.url)
	if err != nil {
		fmt.Fprintln(stderr, "curl:", err)
		if os.IsTimeout(err) {
			return exitTimeout
		}
		return exitConnect
	}
	defer response.Body.Close()
	body := stdout
	if wanted.output != "" {
		file, err := os.Create(wanted.output)
		if err != nil {
			fmt.Fprintln(stderr, "curl:", err)
			return exitUsage
		}
		defer file.Close()
		body = file
	}
	if wanted.include {
		fmt.Fprintf(body, "%s %s\r\n", response.Proto, response.Status)
		response.Header.Write(body)
		fmt.Fprint(body, "\r\n")
	}
	if _, err := io.Copy(body, response.Body); err != nil {
		fmt.Fprintln(stderr, "curl:", err)
		return exitConnect
	}
	fmt.Fprint(stdout, strings.ReplaceAll(wanted.format, "%{http_code}", strconv.Itoa(response.StatusCode)))
	return 0
}

// ipcs lists the shared memory of its IPC namespace, key and identifier first as `ipcs -m` does.
func ipcs(stdout, stderr io.Writer) int {
	content, err := os.ReadFile(sharedFile)
	if err != nil {
		fmt.Fprintln(stderr, "ipcs:", err)
		return 1
	}
	fmt.Fprint(stdout, "\n------ Shared Memory Segments --------\nkey        shmid\n")
	for _, line := range strings.Split(string(content), "\n")[1:] {
		if fields := strings.Fields(line); len(fields) > 1 {
			fmt.Fprintf(stdout, "%-10s %s\n", fields[0], fields[1])
		}
	}
	return 0
}

// nc sends its input and prints what arrives until the peer closes or nothing arrives for `-w` seconds.
func nc(arguments []string, stdin io.Reader, stdout, stderr io.Writer) int {
	network, within := "tcp", time.Minute
	for len(arguments) > 2 {
		if arguments[0] == "-u" {
			network = "udp"
			arguments = arguments[1:]
			continue
		}
		seconds, err := strconv.Atoi(arguments[1])
		if arguments[0] != "-w" || err != nil {
			fmt.Fprintf(stderr, "nc: option %s is unknown or has no number\n", arguments[0])
			return exitUsage
		}
		within = time.Duration(seconds) * time.Second
		arguments = arguments[2:]
	}
	if len(arguments) != 2 {
		fmt.Fprintln(stderr, "nc: no host and port")
		return exitUsage
	}
	connection, err := net.DialTimeout(network, net.JoinHostPort(arguments[0], arguments[1]), within)
	if err != nil {
		fmt.Fprintln(stderr, "nc:", err)
		return 1
	}
	defer connection.Close()
	if _, err := io.Copy(connection, stdin); err != nil {
		fmt.Fprintln(stderr, "nc:", err)
		return 1
	}
	buffer := make([]byte, 64<<10)
	for {
		connection.SetReadDeadline(time.Now().Add(within))
		size, err := connection.Read(buffer)
		stdout.Write(buffer[:size])
		if err == io.EOF || os.IsTimeout(err) {
			return 0
		}
		if err != nil {
			fmt.Fprintln(stderr, "nc:", err)
			return 1
		}
	}
}

func nginx() int {
	ended, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT)
	defer stop()
	listener, err := net.Listen("tcp", ":80")
	if err != nil {
		fmt.Fprintln(os.Stderr, "nginx:", err)
		return 1
	}
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "nginx:", err)
		return 1
	}
	defer os.Remove(pidFile)
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		io.WriteString(w, page)
	})}
	go func() {
		<-ended.Done()
		server.Close()
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		fmt.Fprintln(os.Stderr, "nginx:", err)
		return 1
	}
	return 0
}
